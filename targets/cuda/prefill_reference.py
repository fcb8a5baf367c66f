"""The steps of a long prefill chunk in plain torch and float32, on any device: the reference of
`prefill_kernels.py`.

Shape legend: T tokens of the chunk, S keys, N query heads, K kv heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from targets.arch import LayerSpec
from targets.cuda import cache as kv
from targets.cuda.formulas import gate, inverse_frequencies, key_and_value, rms, rotate
from targets.cuda.ops import NOTHING, AttentionLayer, Closing, Dense, Opening
from targets.cuda.prefill_steps import Pair, PrefillChunk, PrefillInput


class PrefillReference:
    """`prefill_steps.Steps` for one chunk."""

    def __init__(self, chunk: PrefillChunk, eps: float) -> None:
        self.chunk, self.eps = chunk, eps
        device = chunk.tokens.device
        self.positions = chunk.start + torch.arange(len(chunk.tokens), device=device)

    def add_norm(self, h: Tensor, opening: Opening, closing: Closing = NOTHING) -> PrefillInput:
        branch, post, scalar = closing
        if branch is not None:
            h += rms(branch, post, self.eps)
        if scalar is not None:
            h *= scalar
        return PrefillInput(h if opening.pre is None else rms(h, opening.pre, self.eps), None)

    def matmul(self, x: PrefillInput, weight: Dense) -> Tensor:
        return times(x.values, weight)

    def grouped(self, x: PrefillInput, ends: Tensor, weight: Dense) -> Tensor:
        values, scale = weight
        scales = repeat(None, len(values)) if scale is None else scale
        return by_expert(x.values, ends, zip(values, scales, strict=True))

    def gate_up(
        self, x: PrefillInput, parts: Iterator[tuple[slice, Dense]], width: int, kind: str
    ) -> PrefillInput:
        gated = [self.gated(self.matmul(x, weight), kind).values for _, weight in parts]
        return PrefillInput(torch.cat(gated, -1), None)

    def gated(self, gate_up: Tensor, kind: str) -> PrefillInput:
        return PrefillInput(gate(gate_up), None)

    def exchange(self, qkv: Tensor, layer: AttentionLayer) -> Pair:
        slot, start = self.chunk.slot, self.chunk.start
        store, spec = layer.cache, layer.spec
        k, v = key_and_value(qkv, layer.k_norm, spec, self.eps)
        k = rotate(k, self._angles(spec))
        oldest = self.chunk.oldest(spec.window)
        past = [part.transpose(0, 1) for part in kv.read(store, slot, oldest, start)]
        skip = max(0, len(k) - store.size)
        kv.write(store, slot, start + skip, k[skip:], v[skip:])
        fresh = [kv.stored(part, store.k.dtype) for part in (k, v)]
        k, v = (torch.cat([old.float(), new.float()]) for old, new in zip(past, fresh, strict=True))
        return k, v

    def attend(self, qkv: Tensor, layer: AttentionLayer, pair: Pair, kind: str) -> PrefillInput:
        spec = layer.spec
        q = qkv[:, : spec.heads * spec.head_dim].unflatten(-1, (spec.heads, spec.head_dim))
        q = rotate(rms(q, layer.q_norm, self.eps), self._angles(spec))
        parts = []
        for first, stop, both_ways in self.chunk.pieces(spec.window):
            seen = len(pair[0]) - len(q) + stop  # keys up to the piece's last row
            k, v = (part[:seen] for part in pair)
            parts.append(attend(q[first:stop], k, v, spec.window, both_ways))
        return PrefillInput(torch.cat(parts), None)

    def _angles(self, layer: LayerSpec) -> Tensor:
        inverse = inverse_frequencies(layer.rope, layer.head_dim, self.positions.device)
        return self.positions[:, None, None] * inverse


def times(x: Tensor, weight: Dense) -> Tensor:
    """x [T, k] -> [T, n] float32."""
    values, scale = weight
    if scale is None:
        return (x.to(values.dtype) @ values.T).float()
    return (x @ values.float().T) * scale


def by_expert(x: Tensor, ends: Tensor, weights: Iterable[Dense]) -> Tensor:
    """`times` of rows that are sorted by expert, each with its own expert's weight."""
    parts = x.split(ends.diff(prepend=ends.new_zeros(1)).tolist())
    return torch.cat([times(part, own) for part, own in zip(parts, weights, strict=True)])


def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None, both_ways: bool = False) -> Tensor:
    """q [T, N, D], k and v [S, K, D], of which the last T are the queries' own -> [T, N * D].
    both_ways: each query sees all of these."""
    if both_ways:
        return _masked(q, k, v, window, True).flatten(1)
    block = len(q) if window is None else window
    parts = []
    for first in range(0, len(q), block):
        part = q[first : first + block]
        stop = len(k) - len(q) + first + len(part)
        start = 0 if window is None else max(0, stop - len(part) - window + 1)
        parts.append(_masked(part, k[start:stop], v[start:stop], window))
    return torch.cat(parts).flatten(1)


def _masked(q: Tensor, k: Tensor, v: Tensor, window: int | None, both_ways: bool = False) -> Tensor:
    ahead = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
    ahead = ahead - torch.arange(len(k), device=q.device)  # how far a query is past a key
    seen = ahead < len(k) if window is None else ahead < window
    if not both_ways:
        seen &= ahead >= 0
    heads = q.shape[1] // k.shape[1]
    # shared KV heads are repeated: the kernel with masks and wide heads can't share them
    wide = [x.repeat_interleave(heads, 1).transpose(0, 1)[None] for x in (k, v)]
    # on a GPU nothing else will do: torch's fallback would hold a score for every pair
    kinds = [SDPBackend.EFFICIENT_ATTENTION]
    with sdpa_kernel(kinds if q.is_cuda else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], *wide, attn_mask=seen, scale=1.0
        )
    return out[0].transpose(0, 1)
