"""A long prefill chunk of one sequence: bound by arithmetic, so the library's matmuls do it.

It reads the window before the chunk from the cache, attends to that and to the chunk's own keys
and values (rounded as the cache rounds them), and leaves in the cache what later calls need. Not
bitwise `model.decode`: which of the two a chunk takes follows from its own length alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from targets.arch import Arch, LayerSpec, MoeSpec
from targets.cuda import cache as kv, library
from targets.cuda.cache import KVCache, LayerCache
from targets.cuda.formulas import (
    gate,
    gelu,
    inverse_frequencies,
    lookup,
    mix_inputs,
    new_entry,
    rank,
    rms,
    rotate,
)
from targets.cuda.model import Hidden
from targets.cuda.ops import Linear, Ops
from targets.cuda.params import LayerWeights, Moe, PerLayer, Weights

Pair = tuple[torch.Tensor, torch.Tensor]
"""k, v [S, K, D]: all that the chunk's queries may see in one layer."""


@dataclass(frozen=True)
class Chunk:
    """tokens [T] int32 on the device, at positions start .. start + T - 1 of `slot`."""

    tokens: torch.Tensor
    start: int
    slot: int


def prefill(
    weights: Weights,
    arch: Arch,
    cache: KVCache,
    chunk: Chunk,
    ops: Ops,
    features: tuple[int, ...] = (),
) -> Hidden:
    """Logits [1, V] after the chunk's last token; features [T, F]."""
    return _Pass(weights, arch, cache, chunk, ops).run(features)


class _Pass:
    """One chunk on its way through the layers; h [T, H] is float32, branches are in `dtype`."""

    def __init__(
        self, weights: Weights, arch: Arch, cache: KVCache, chunk: Chunk, ops: Ops
    ) -> None:
        self.weights, self.arch, self.cache, self.chunk, self.ops = weights, arch, cache, chunk, ops
        device = chunk.tokens.device
        self.dtype = weights.embed.dtype if device.type == "cuda" else torch.float32
        self.positions = chunk.start + torch.arange(len(chunk.tokens), device=device)
        self.lenders = {layer.kv_from for layer in arch.layers}
        self.lent: dict[int | None, Pair] = {}

    def run(self, features: tuple[int, ...]) -> Hidden:
        weights, arch, eps = self.weights, self.arch, self.arch.eps
        h = lookup(weights.embed, self.chunk.tokens, arch.hidden)
        inputs = self._per_layer_inputs(h)
        states: dict[int, torch.Tensor] = {}
        for i, w in enumerate(weights.layers):
            h += rms(self._attention(i, h, w), w.post_attention_norm, eps)
            h += rms(self._feed_forward(h, w, arch.layers[i].moe), w.post_feedforward_norm, eps)
            if w.per_layer and inputs is not None:
                extra = self._gated_inputs(h, w.per_layer, inputs[:, i])
                h += rms(extra, w.per_layer.post_norm, eps)
            h *= w.scalar
            if i in features:
                states[i] = h.clone()
        x = self.ops.norm(h[-1:], None, None, None, weights.norm, weights.head.kind)
        captured = torch.cat([states[i] for i in features], -1) if features else None
        return Hidden(self.ops.head(x, weights.head, arch.softcap), captured)

    def _project(self, x: torch.Tensor, weight: Linear) -> torch.Tensor:
        return library.matmul(x, *self.ops.dense(weight)).to(self.dtype)

    def _normed(self, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms(h, weight, self.arch.eps).to(self.dtype)

    def _attention(self, i: int, h: torch.Tensor, w: LayerWeights) -> torch.Tensor:
        layer = self.arch.layers[i]
        qkv = self._project(self._normed(h, w.input_norm), w.qkv)
        angles = self.positions[:, None, None] * inverse_frequencies(
            layer.rope, layer.head_dim, h.device
        )
        q = qkv[:, : layer.heads * layer.head_dim].unflatten(-1, (layer.heads, layer.head_dim))
        q = rotate(rms(q, w.q_norm, self.arch.eps), angles).to(self.dtype)
        if w.k_norm is None:
            k, v = self.lent[layer.kv_from]
        else:
            fresh = new_entry(qkv, w.k_norm, layer, angles, self.arch.eps)
            k, v = self._exchange(self.cache.of(self.arch.layers, i), layer, *fresh)
        if i in self.lenders:
            self.lent[i] = k, v
        return self._project(library.attend(q, k, v, layer.window), w.o)

    def _exchange(
        self, store: LayerCache, layer: LayerSpec, k: torch.Tensor, v: torch.Tensor
    ) -> Pair:
        """Store the chunk's k, v [T, K, D], of a ring's no more than it holds, and return them
        behind what the cache had for the first query."""
        slot, start = self.chunk.slot, self.chunk.start
        oldest = 0 if layer.window is None else max(0, start - layer.window + 1)
        past = [part.transpose(0, 1) for part in kv.read(store, slot, oldest, start)]
        skip = max(0, len(k) - store.size)
        kv.write(store, slot, start + skip, k[skip:], v[skip:])
        fresh = [kv.stored(part, store.k.dtype) for part in (k, v)]
        k, v = (
            torch.cat([old.to(self.dtype), new.to(self.dtype)])
            for old, new in zip(past, fresh, strict=True)
        )
        return k, v

    def _feed_forward(self, h: torch.Tensor, w: LayerWeights, moe: MoeSpec | None) -> torch.Tensor:
        x = self._normed(h, w.pre_feedforward_norm)
        dense = self._project(gate(self._project(x, w.gate_up)), w.down)
        if not (moe and w.moe):
            return dense
        routed = self._experts(h, w.moe, moe)
        eps = self.arch.eps
        return rms(dense, w.moe.dense_norm, eps) + rms(routed, w.moe.routed_norm, eps)

    def _experts(self, h: torch.Tensor, w: Moe, moe: MoeSpec) -> torch.Tensor:
        """Rows sorted by expert, one matmul for each; summed in rank order [T, H] float32. How
        many rows each expert has must reach the host."""
        x = self._normed(h, w.router_scale * self.arch.hidden**-0.5)
        shares = self._project(x, w.router).float().softmax(-1)
        numbers, parts = rank(shares, w.per_expert, moe)
        order = numbers.flatten().argsort(stable=True)
        counts = numbers.flatten().bincount(minlength=moe.experts).tolist()
        x = self._normed(h, w.pre_norm)[order // moe.top_k]
        x = gate(self._by_expert(x, counts, w.gate_up))
        out = torch.empty((len(order), self.arch.hidden), device=h.device)
        out[order] = self._by_expert(x, counts, w.down).float()
        return (out.unflatten(0, numbers.shape) * parts[..., None]).sum(1)

    def _by_expert(self, x: torch.Tensor, counts: list[int], weight: Linear) -> torch.Tensor:
        values, scale = self.ops.dense(weight)
        values = values.unflatten(0, (len(counts), -1))
        scales = [None] * len(counts) if scale is None else scale.unflatten(0, (len(counts), -1))
        rows = zip(x.split(counts), values, scales, strict=True)
        return torch.cat([library.matmul(*each).to(self.dtype) for each in rows if len(each[0])])

    def _per_layer_inputs(self, h: torch.Tensor) -> torch.Tensor | None:
        """[T, L, P] float32."""
        top = self.weights.per_layer
        if top is None:
            return None
        mixed = self._project(h.to(self.dtype), top.projection).float()
        mixed = mix_inputs(self.arch, mixed, top.table, top.norm, self.chunk.tokens)
        return mixed.unflatten(-1, (len(self.arch.layers), self.arch.per_layer_input))

    def _gated_inputs(self, h: torch.Tensor, w: PerLayer, inputs: torch.Tensor) -> torch.Tensor:
        gated = gelu(self._project(h.to(self.dtype), w.gate)) * inputs
        return self._project(gated.to(self.dtype), w.projection)
