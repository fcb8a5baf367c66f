"""Split-KV attention as launches of `kernels/attention.cu`: a part of `Kernels`."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_void_p
from typing import Any

import torch

from targets.arch import Arch, LayerSpec, Rope
from targets.cuda.cache import CHUNK, LayerCache
from targets.cuda.formulas import inverse_frequencies
from targets.cuda.inputs import Input, make_input
from targets.cuda.launch import Launch, Variant, address, pointer
from targets.cuda.ops import Rows

PARTIAL_BYTES = 256 << 20
"""Most that partial results may take; longer calls are cut by tokens."""
THREADS = 256
HEADS = (64, 128, 256, 512)
"""What head_dim is padded to: there is a kernel for each."""
TILES = (1, 2)
"""16-row tiles of query rows per CTA."""


class _Job(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "q_norm", "k_norm", "cosine", "sine", "k", "v")),
        *((name, c_void_p) for name in ("q", "start", "slot", "partial", "weight")),
        *((name, c_int) for name in ("stride", "tokens", "group", "kv_heads", "head_dim")),
        *((name, c_int) for name in ("entries", "window", "chunks", "own", "k_eq_v")),
        ("eps", c_float),
    )


def variants(arch: Arch, kv8: int, kinds: set[str]) -> set[Variant]:
    """kv8: whether the cache is e4m3. kinds: of the output projections."""
    dims = {_padded(layer.head_dim) for layer in arch.layers}
    return {_variant(dim, high, kv8, kind) for dim in dims for high in TILES for kind in kinds}


class Attention:
    """For one architecture with up to this many positions."""

    def __init__(
        self, launch: Launch, arch: Arch, positions: int, kv8: int, device: torch.device
    ) -> None:
        self._launch, self._positions, self._kv8 = launch, positions, kv8
        self._eps, self._device = arch.eps, device
        self._rope = {
            (layer.rope, layer.head_dim): _rope_tables(
                layer.rope, layer.head_dim, positions, device
            )
            for layer in {layer.rope: layer for layer in arch.layers}.values()
        }

    def run(
        self,
        qkv: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor | None],
        layer: LayerSpec,
        cache: LayerCache,
        rows: Rows,
        kind: str,
    ) -> Input:
        """`Ops.attention`. norms: q's and k's."""
        batch, tokens = rows.tokens.shape
        x = make_input(batch * tokens, layer.heads * layer.head_dim, self._device)
        step = self._tokens_at_once(batch, tokens, layer)
        for t in range(0, tokens, step):
            part = Rows(
                rows.tokens[:, t : t + step], rows.start + t if t else rows.start, rows.slot
            )
            self._part(qkv[t:] if t else qkv, part, t, x, norms, layer, cache, kind)
        return x

    def _part(
        self,
        qkv: torch.Tensor,
        rows: Rows,
        first: int,
        x: Input,
        norms: tuple[torch.Tensor, torch.Tensor | None],
        layer: LayerSpec,
        cache: LayerCache,
        kind: str,
    ) -> None:
        dim, group = _padded(layer.head_dim), layer.heads // layer.kv_heads
        batch, tokens = rows.tokens.shape
        queries, chunks = tokens * group, self._chunks(tokens, layer)
        new = lambda *shape: torch.empty(shape, device=self._device)  # noqa: E731
        q = torch.empty(
            batch * layer.kv_heads * queries * dim, dtype=torch.int16, device=self._device
        )
        partial = new(batch * layer.kv_heads, chunks, queries, dim)
        weight = new(batch * layer.kv_heads, chunks, queries, 2)
        cosine, sine = self._rope[layer.rope, layer.head_dim]
        window = layer.window or 0
        job = _Job(
            *map(address, (qkv, *norms, cosine, sine, cache.k, cache.v)),
            *map(address, (q, rows.start, rows.slot, partial, weight)),
            *(qkv.stride(0), tokens, group, layer.kv_heads, layer.head_dim, cache.size, window),
            *(chunks, int(layer.kv_from is None), int(layer.k_eq_v), self._eps),
        )
        high = TILES[0] if queries <= 16 else TILES[1]
        variant = _variant(dim, high, self._kv8, kind)
        vectors = layer.heads + (layer.kv_heads if layer.kv_from is None else 0)
        # a later part's starts were computed just now: it can't overtake that
        grid = (batch * tokens, -(-vectors // 8), 1)
        self._launch(variant, "prepare", grid, THREADS, [job], early=not first)
        grid = (chunks, layer.kv_heads, batch * -(-queries // (16 * high)))
        self._launch(variant, "attend", grid, THREADS, [job], _shared(dim, high))
        arguments: list[Any] = [*map(pointer, (partial, weight, rows.start, rows.slot, x.data))]
        arguments += map(c_int, (tokens, group, layer.kv_heads, layer.head_dim, window, chunks))
        arguments += map(c_int, (x.k_blocks, x.block, first))
        grid = (batch * tokens, layer.heads, 1)
        self._launch(variant, "combine", grid, dim, arguments)

    def _chunks(self, tokens: int, layer: LayerSpec) -> int:
        """Most chunks that a call of this many tokens per sequence can see."""
        every = -(-self._positions // CHUNK)
        return min(every, (layer.window + tokens - 2) // CHUNK + 2) if layer.window else every

    def _tokens_at_once(self, batch: int, tokens: int, layer: LayerSpec) -> int:
        """All of them, unless a lone sequence's partial results would grow too large."""
        if batch > 1:
            return tokens
        per_token = self._chunks(tokens, layer) * layer.heads * _padded(layer.head_dim) * 4
        return max(1, min(tokens, PARTIAL_BYTES // per_token))


def _variant(dim: int, high: int, kv8: int, kind: str) -> Variant:
    return Variant(
        "attention", (("HD", dim), ("MT", high), ("KV8", kv8), ("FP8", int(kind == "fp8")))
    )


def _shared(dim: int, high: int) -> int:
    rows = 16 * high
    return rows * dim * 2 + rows * (CHUNK + 4) * 4 + rows * CHUNK * 2


def _padded(head_dim: int) -> int:
    return next(dim for dim in HEADS if head_dim <= dim)


def _rope_tables(
    rope: Rope, head_dim: int, positions: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [positions, head_dim / 2] float32; pairs that don't rotate get angle 0."""
    places = torch.arange(positions, device=device, dtype=torch.float32)
    angles = places[:, None] * inverse_frequencies(rope, head_dim, device)[: head_dim // 2]
    return angles.cos(), angles.sin()
