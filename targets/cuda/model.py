"""Gemma 4 in the words of `ops.Ops`: verify, plain decoding and prompts of up to 1,024 tokens are
this one forward. Longer prefill chunks take the library's matmuls instead (`prefill.py`).

A norm closes one branch and opens the next: residual, layer scalar and the next layer's input
norm are one operation, so that a kernel reads and writes the stream once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.core.types import NO_GUESS
from targets.arch import Arch, MoeSpec
from targets.cuda.cache import KVCache
from targets.cuda.certified import MOST_ROWS
from targets.cuda.ops import (
    AttentionLayer,
    Branch,
    Choosing,
    Closing,
    DenseBranch,
    Opening,
    Ops,
    RoutedBranch,
    Rows,
    X,
)
from targets.cuda.params import LayerWeights, Moe, Weights

ALL_ROWS_TO_THE_END = 64
"""Tokens of a prefill call up to which all its rows run through all layers: fewer would not take
less time."""


class Hidden(NamedTuple):
    """logits [M, V] float32, soft-capped, of each row, of one alone, or None where none were
    needed; features [M, F]: the chosen layers' outputs, or None."""

    logits: Tensor | None
    features: Tensor | None


def decode(
    weights: Weights,
    arch: Arch,
    cache: KVCache,
    rows: Rows,
    ops: Ops,
    features: tuple[int, ...] = (),
    only: Tensor | None = None,
    choosing: Choosing | None = None,
    remembers: bool = False,
) -> Hidden:
    """Feed the rows: write their K/V, attend over the cache alone. only [B]: logits of these rows
    alone, one of each sequence. choosing: how words are chosen, if logits are used for nothing
    else; words that can't be chosen may then have -inf. `remembers`: whether the tokens are also
    written to their slots' text."""
    many = only is not None and rows.tokens.shape[1] > ALL_ROWS_TO_THE_END
    last = last_of_all_rows(arch, features) if many else len(arch.layers)
    # made before the call's first kernel: others read places before those in front of them end
    ending = _last_rows(rows, only) if only is not None and last < len(arch.layers) else None
    h = ops.embed(weights.embedding, rows, cache.tokens if remembers else None)
    if rows.soft is not None:  # per-layer inputs are those of id 0: see `pictures.py`
        h = torch.where((rows.tokens < NO_GUESS).view(-1, 1), rows.soft, h)
    inputs = _per_layer_inputs(weights, h, rows, ops)
    x = ops.norm(h, opening(weights, 0))
    captured = h.new_empty((len(h), len(features), arch.hidden)) if features else None
    for i, w in enumerate(weights.layers):
        layer = AttentionLayer(arch.layers[i], cache.of(arch.layers, i), w.q_norm, w.k_norm)
        kept = captured[:, features.index(i)] if captured is not None and i in features else None
        qkv = ops.linear(x, w.qkv)
        if i == last and ending is not None and only is not None:
            if layer.spec.kv_from is None:
                ops.store(qkv, layer, rows)
            h, qkv = h.index_select(0, only), qkv.index_select(0, only)
            inputs = None if inputs is None else inputs.index_select(0, only)
            rows, only = ending, None
        x = _rest(h, qkv, w, layer, rows, ops, opening(weights, i + 1), (inputs, i), kept)
    if only is not None:
        x = ops.norm(h.index_select(0, only), opening(weights, len(weights.layers)))
    narrow = weights.narrow_head
    if choosing is None or narrow is None or rows.tokens.numel() > MOST_ROWS:
        logits = ops.head(x, weights.head, arch.softcap)
    else:
        logits = ops.candidates(x, (weights.head, narrow), arch.softcap, rows, choosing)
    return Hidden(logits, None if captured is None else captured.flatten(1))


def decode_layer(
    h: Tensor,
    x: X,
    w: LayerWeights,
    layer: AttentionLayer,
    rows: Rows,
    ops: Ops,
    following: Opening,
    per_layer: tuple[Tensor | None, int] = (None, 0),
    kept: Tensor | None = None,
) -> X:
    """One decoder layer on the stream h [M, H], in place, where x is what its input norm made; ->
    what `following` opens with. per_layer: all layers' inputs (E2B, E4B), and which this one is.
    kept [M, H]: becomes a copy of what the layer leaves."""
    return _rest(h, ops.linear(x, w.qkv), w, layer, rows, ops, following, per_layer, kept)


def last_of_all_rows(arch: Arch, features: tuple[int, ...]) -> int:
    """The last layer that prefill feeds all rows to, for their K/V. In it, behind these, and in
    all others only rows continue whose logits are needed. The number of layers where all rows are
    needed to the end: by `features`."""
    stores = max(i for i, layer in enumerate(arch.layers) if layer.kv_from is None)
    return max(stores, *(i + 1 for i in features), 0)


def _last_rows(rows: Rows, only: Tensor) -> Rows:
    """Row `only` [B] of each sequence alone, which sees no token behind itself."""
    tokens = rows.tokens.flatten().index_select(0, only)[:, None]
    return Rows(tokens, rows.start + (only % rows.tokens.shape[1]).int(), rows.slot)


def _rest(
    h: Tensor,
    qkv: Tensor,
    w: LayerWeights,
    layer: AttentionLayer,
    rows: Rows,
    ops: Ops,
    following: Opening,
    per_layer: tuple[Tensor | None, int],
    kept: Tensor | None,
) -> X:
    """`decode_layer` from its queries, keys and values on."""
    mixed = ops.attention(qkv, layer, rows, w.o.kind)
    closing = Closing(ops.branch(mixed, w.o), w.post_attention_norm)
    if layer.spec.moe and w.moe:
        branch = _mixture(h, closing, w, w.moe, layer.spec.moe, rows, ops)
    else:
        x = ops.norm(h, Opening(w.pre_feedforward_norm, w.gate_up.kind), closing)
        branch = ops.branch(ops.gated(x, w.gate_up, w.down.kind), w.down)
    post, (inputs, i) = w.post_feedforward_norm, per_layer
    if w.per_layer and inputs is not None:
        gate, projection = w.per_layer.gate, w.per_layer.projection
        x = ops.norm(h, Opening(None, gate.kind), Closing(branch, post))
        x = ops.gated_per_layer(x, gate, inputs, i, projection.kind)
        branch, post = ops.branch(x, projection), w.per_layer.post_norm
    return ops.norm(h, following, Closing(branch, post, w.scalar), kept)


def opening(weights: Weights, i: int) -> Opening:
    """The `Opening` of layer i, or of the head."""
    if i == len(weights.layers):
        return Opening(weights.norm, weights.head.kind)
    layer: LayerWeights = weights.layers[i]
    return Opening(layer.input_norm, layer.qkv.kind)


def _per_layer_inputs(weights: Weights, h: Tensor, rows: Rows, ops: Ops) -> Tensor | None:
    top = weights.per_layer
    if top is None:
        return None
    x = ops.norm(h, Opening(None, top.projection.kind))
    return ops.per_layer_inputs(ops.linear(x, top.projection), top.table, top.norm, rows)


def _mixture(
    h: Tensor, closing: Closing, w: LayerWeights, moe: Moe, spec: MoeSpec, rows: Rows, ops: Ops
) -> Branch:
    """The dense feed-forward and the routed one of the same stream."""
    openings = (
        Opening(w.pre_feedforward_norm, w.gate_up.kind),
        Opening(moe.router_scale, moe.router.kind),
        Opening(moe.pre_norm, moe.gate_up.kind),
    )
    x, x_router, x_experts = ops.norm_moe(h, openings, rows, closing)
    dense = DenseBranch(x, w.gate_up, w.down, moe.dense_norm)
    experts = moe.gate_up, moe.down, moe.routed_norm
    routed = RoutedBranch(x_router, moe.router, moe.per_expert, x_experts, *experts)
    return ops.mixture(dense, routed, rows, spec)
