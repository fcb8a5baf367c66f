"""A long prefill chunk of one sequence: bound by arithmetic, so the library's matmuls do it.

It reads the window before the chunk from the cache, attends to that and to the chunk's own keys
and values (rounded as the cache rounds them), and leaves in the cache what later calls need. Not
bitwise `model.decode`: which of the two a chunk takes follows from its own length, from where it
begins, and from whether it has a picture.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

import torch
from torch import Tensor

from specdec.core.pictures import SoftRows
from targets.arch import Arch, LayerSpec, MoeSpec
from targets.cuda import four_bits
from targets.cuda.cache import KVCache
from targets.cuda.formulas import gelu, mix_inputs, rank, rms
from targets.cuda.model import Hidden, last_of_all_rows, opening
from targets.cuda.ops import AttentionLayer, Closing, Linear, Opening, Ops
from targets.cuda.params import LayerWeights, Moe, PerLayer, Weights
from targets.cuda.prefill_kernels import PrefillKernels
from targets.cuda.prefill_reference import PrefillReference
from targets.cuda.prefill_steps import Pair, PrefillChunk, PrefillInput, Steps
from targets.cuda.reference import Reference

TAIL = 16
"""Rows of a prompt's last chunk that continue behind the last layer that stores keys and values:
only the last row's logits are needed, and the library's matmuls need 16 rows."""
PART_TOKENS = 512
"""A prompt's first chunk is read in as many parts as it has this many tokens, each of equally many
layers: others wait for a part. Later chunks take longer, and have more parts. Cut so, rather than
by tokens, no sum depends on it."""
SCORES_COST = 4
"""Time of a product with keys or values ÷ one of as much arithmetic with weights: scores go through
memory. 31B in FP8 on an H200, at 100,000 positions."""


def prefill(
    weights: Weights,
    arch: Arch,
    cache: KVCache,
    chunk: PrefillChunk,
    ops: Ops,
    features: tuple[int, ...] = (),
    ends: bool = True,
    pictures: SoftRows = (),
) -> Iterator[Hidden | None]:
    """None after each part but the last, then logits [1, V] after the chunk's last token, if the
    prompt `ends` there, and features [T, F]."""
    return _Pass(weights, arch, cache, chunk, ops).run(features, ends, pictures)


def parts_begin(arch: Arch, last: int, tokens: int, start: int) -> list[int]:
    """The layers with which a further part of a chunk begins, none from `last` on."""

    def work(layer: LayerSpec, first: int) -> float:
        return _weights(arch, layer) + SCORES_COST * _scores(layer, first + tokens // 2)

    layers, begins, done = arch.layers[:last], [], 0.0
    shares = tokens / PART_TOKENS
    enough = sum(work(layer, 0) for layer in layers) / (ceil(shares) if shares > 1 else shares)
    for i, layer in enumerate(layers[:-1]):
        done += work(layer, start)
        if done >= enough:
            begins.append(i + 1)
            done = 0.0
    return begins


def _weights(arch: Arch, layer: LayerSpec) -> int:
    """Products of a token with a layer's weights."""
    width, moe = layer.head_dim, layer.moe
    attention = (layer.heads + layer.kv_heads) * width
    routed = 0 if moe is None else moe.top_k * moe.width
    return arch.hidden * (2 * attention + 3 * (layer.ffw + routed))


def _scores(layer: LayerSpec, keys: int) -> int:
    """Products of a token with the keys and the values that it sees."""
    return 2 * layer.heads * layer.head_dim * min(keys, layer.window or keys)


def _steps(chunk: PrefillChunk, ops: Ops, eps: float) -> Steps:
    make = PrefillReference if isinstance(ops, Reference) else PrefillKernels
    return make(chunk, eps)


class _Pass:
    """One chunk on its way through the layers; h [T, H] is float32."""

    def __init__(
        self,
        weights: Weights,
        arch: Arch,
        cache: KVCache,
        chunk: PrefillChunk,
        ops: Ops,
    ) -> None:
        self.weights, self.arch, self.cache, self.chunk = weights, arch, cache, chunk
        self.ops, self.steps = ops, _steps(chunk, ops, arch.eps)
        self.lenders = {layer.kv_from for layer in arch.layers}
        self.lent: dict[int | None, Pair] = {}

    def run(
        self, features: tuple[int, ...], ends: bool, pictures: SoftRows
    ) -> Iterator[Hidden | None]:
        """ends: the prompt ends with this chunk."""
        weights, arch = self.weights, self.arch
        h = self.ops.embed(weights.embedding, self.chunk.as_rows())
        for first, rows in pictures:  # per-layer inputs are those of id 0: see `pictures.py`
            h[first : first + len(rows)] = rows
        inputs = self._per_layer_inputs(h)
        x = self.steps.add_norm(h, opening(weights, 0))
        captured = h.new_empty((len(h), len(features), arch.hidden)) if features else None
        last = last_of_all_rows(arch, features)
        begins = parts_begin(arch, last, len(h), self.chunk.start)
        for i, w in enumerate(weights.layers):
            if i in begins:
                yield None
            qkv = self._project(x, w.qkv)
            layer, pair = self._keys(i, qkv, w)
            if i == last:
                if not ends:
                    break
                h, qkv = h[-TAIL:], qkv[-TAIL:]
                inputs = None if inputs is None else inputs[-TAIL:]
                self.steps = _steps(self.chunk.end(TAIL), self.ops, arch.eps)
            mixed = self.steps.attend(qkv, layer, pair, w.o.kind)
            del qkv, pair
            x = self._behind_attention(i, h, mixed, w, None if inputs is None else inputs[:, i])
            if captured is not None and i in features:
                captured[:, features.index(i)] = h
        kept = None if captured is None else captured.flatten(1)
        yield Hidden(self._logits(h) if ends else None, kept)

    def _logits(self, h: Tensor) -> Tensor:
        weights = self.weights
        last = self.ops.norm(h[-1:], opening(weights, len(weights.layers)))
        return self.ops.head(last, weights.head, self.arch.softcap)

    def _behind_attention(
        self, i: int, h: Tensor, mixed: PrefillInput, w: LayerWeights, inputs: Tensor | None
    ) -> PrefillInput:
        """What a layer adds to h from attention's output on, in place; -> the next one's input."""
        add_norm, post = self.steps.add_norm, w.post_feedforward_norm
        closing = Closing(self._project(mixed, w.o), w.post_attention_norm)
        x = add_norm(h, Opening(w.pre_feedforward_norm, w.gate_up.kind), closing)
        del mixed, closing  # room for what is widest
        branch = self._feed_forward(h, x, w, self.arch.layers[i].moe)
        if w.per_layer and inputs is not None:
            x = add_norm(h, Opening(None, w.per_layer.gate.kind), Closing(branch, post))
            branch = self._gated_inputs(x, w.per_layer, inputs)
            post = w.per_layer.post_norm
        return add_norm(h, opening(self.weights, i + 1), Closing(branch, post, w.scalar))

    def _project(self, x: PrefillInput, weight: Linear) -> Tensor:
        return self.steps.matmul(x, self.ops.dense(weight))

    def _keys(self, i: int, qkv: Tensor, w: LayerWeights) -> tuple[AttentionLayer, Pair]:
        """Layer i, with the keys and values that it attends to; new ones are stored."""
        layers = self.arch.layers
        layer = AttentionLayer(layers[i], self.cache.of(layers, i), w.q_norm, w.k_norm)
        donor = layer.spec.kv_from
        pair = self.steps.exchange(qkv, layer) if donor is None else self.lent[donor]
        if i in self.lenders:
            self.lent[i] = pair
        return layer, pair

    def _feed_forward(
        self, h: Tensor, x: PrefillInput, w: LayerWeights, moe: MoeSpec | None
    ) -> Tensor:
        parts = self.ops.dense_parts(w.gate_up)
        gated = self.steps.gate_up(x, parts, w.gate_up.n // 2, w.down.kind)
        dense = self._project(gated, w.down)
        if not (moe and w.moe):
            return dense
        routed = self._experts(h, w.moe, moe)
        eps = self.arch.eps
        return rms(dense, w.moe.dense_norm, eps) + rms(routed, w.moe.routed_norm, eps)

    def _experts(self, h: Tensor, w: Moe, moe: MoeSpec) -> Tensor:
        """Rows sorted by expert, summed in rank order [T, H] float32."""
        router = w.router_scale * self.arch.hidden**-0.5
        x = self.steps.add_norm(h, Opening(router, w.router.kind))
        shares = self._project(x, w.router).float().softmax(-1)
        numbers, parts = rank(shares, w.per_expert, moe)
        order = numbers.flatten().argsort(stable=True)
        edges = torch.arange(moe.experts, dtype=torch.int32, device=h.device)
        ends = torch.searchsorted(numbers.flatten()[order], edges, right=True, out_int32=True)
        x = self.steps.add_norm(h, Opening(w.pre_norm, w.gate_up.kind))
        gate_up = self._by_expert(x.rows(order // moe.top_k), ends, w.gate_up)
        down = self._by_expert(self.steps.gated(gate_up, w.down.kind), ends, w.down)
        out = torch.empty((len(order), self.arch.hidden), device=h.device)
        out[order] = down.float()
        return (out.unflatten(0, numbers.shape) * parts[..., None]).sum(1)

    def _by_expert(self, x: PrefillInput, ends: Tensor, weight: Linear) -> Tensor:
        if weight.kind in four_bits.KINDS:  # of float16 the library multiplies one after the other
            return self.ops.grouped(x.values, ends, weight)
        values, scale = self.ops.dense(weight)
        shape = len(ends), -1
        scale = None if scale is None else scale.unflatten(0, shape)
        return self.steps.grouped(x, ends, (values.unflatten(0, shape), scale))

    def _per_layer_inputs(self, h: Tensor) -> Tensor | None:
        """[T, L, P] float32."""
        top = self.weights.per_layer
        if top is None:
            return None
        x = self.steps.add_norm(h, Opening(None, top.projection.kind))
        mixed = self._project(x, top.projection).float()
        mixed = mix_inputs(self.arch, mixed, top.table, top.norm, self.chunk.tokens)
        return mixed.unflatten(-1, (len(self.arch.layers), self.arch.per_layer_input))

    def _gated_inputs(self, x: PrefillInput, w: PerLayer, inputs: Tensor) -> Tensor:
        gated = gelu(self._project(x, w.gate)) * inputs
        # per-layer weights are wide in any case (reader.py), and so are their inputs
        return self._project(PrefillInput(gated.to(x.values.dtype), None), w.projection)
