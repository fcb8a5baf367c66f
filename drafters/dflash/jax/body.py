"""A block drafter's forward in JAX: keys and values made of the target's features, and the block
that attends to them.

Shape legend: B rows, T tokens, U slots of a block, H hidden, F = features, N query heads, K kv
heads, D head_dim, S cache entries, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from drafters.dflash.jax.convolution import convolved
from drafters.dflash.spec import BlockLayer, BlockSpec, Body
from specdec.core.types import Array
from targets.jax.layers import MASKED, project, project_wide, rms_norm, rope_tables, rotate
from targets.jax.placing import put, replicated, zeros

Weights = dict[str, Any]
"""Arrays by the names of `drafters.dflash.spec.tensors`."""
SPLIT = {
    "q_proj": (0, "heads"),
    "o_proj": (1, "heads"),
    "gate_proj": (0, "ffw"),
    "up_proj": (0, "ffw"),
    "down_proj": (1, "ffw"),
}
"""By the end of a weight's name: which axis is split over devices, and what must divide."""
PIECE = 1 << 14
"""Rows of two tables that are compared at once."""


class LayerCache(NamedTuple):
    """k, v [slots, S, K, D] of one layer: position p lies in entry p mod S, and is valid iff it is
    one of the last S before the text's last token."""

    k: Array
    v: Array


Caches = tuple[LayerCache, ...]
Exchange = Callable[[Array, Array, Array], Array]
"""A layer's attention: q [B, U, N, D] (scaled, rotated) and the block's own k and v [B, U, K, D] ->
what they mix with the context's [B, U, N * D]."""


def place(weights: dict[str, np.ndarray], body: Body, dtype: Any, mesh: Mesh | None) -> Weights:
    """Weights on the devices, in `dtype`."""
    return {
        name: put(np.asarray(value).astype(dtype), _sharding_of(name, body, mesh))
        for name, value in weights.items()
    }


def _sharding_of(name: str, body: Body, mesh: Mesh | None) -> NamedSharding | None:
    """Split as in the target; what does not divide is on each device, and so is the cache."""
    axis, parts = SPLIT.get(name.rsplit(".", 1)[-1], (0, None))
    if mesh is None or parts is None or _count(body, parts) % mesh.shape["tp"]:
        return replicated(mesh)
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, "tp"))


def _count(body: Body, parts: str) -> int:
    return {"heads": body.heads, "ffw": body.ffw}[parts]


def equals(stored: np.ndarray, table: Array) -> bool:
    """Whether a file's table has the values of one on the device, in that one's dtype."""
    if not isinstance(table, jax.Array) or stored.shape != table.shape:
        return False
    pieces = range(0, len(stored), PIECE)
    return all(
        bool(jnp.array_equal(stored[at : at + PIECE].astype(table.dtype), table[at : at + PIECE]))
        for at in pieces
    )


def entries(layer: BlockLayer, longest: int) -> int:
    """Cache entries S of a layer. Only accepted tokens are written, so a ring needs no slack: the
    block's first slot sees window - 1 of them."""
    return min(layer.window or longest, longest)


def make_caches(
    spec: BlockSpec, slots: int, longest: int, dtype: Any, mesh: Mesh | None = None
) -> Caches:
    def one(layer: BlockLayer) -> LayerCache:
        shape = (slots, entries(layer, longest), spec.body.kv_heads, spec.body.head_dim)
        return LayerCache(*(zeros(shape, dtype, replicated(mesh)) for _ in LayerCache._fields))

    return tuple(map(one, spec.body.layers))


def context(weights: Weights, spec: BlockSpec, features: Array) -> Array:
    """The target's features [B, T, F] -> what all layers make their keys and values of
    [B, T, H]."""
    return rms_norm(project(features, weights["fc"]), weights["hidden_norm"], spec.body.eps)


def inject(
    weights: Weights,
    spec: BlockSpec,
    caches: Caches,
    features: Array,
    rows: Array,
    positions: Array,
) -> Caches:
    """Write the entries of features [B, T, F] at positions [B, T] of slots rows [B]. A negative
    position writes nothing: what a verify rejected never enters."""
    fused, body = context(weights, spec, features), spec.body
    tables = rope_tables(body.rope, body.head_dim, positions)
    newest = positions.max(1, keepdims=True)

    def write(number: int, cache: LayerCache) -> LayerCache:
        size = cache.k.shape[1]
        k, v = keys_values(layer_of(weights, number), body, fused, tables)
        lasting = (positions >= 0) & (positions > newest - size)  # no entry is written twice
        where = jnp.where(lasting, positions % size, size)
        at = rows[:, None], where
        new_k = cache.k.at[at].set(k.astype(cache.k.dtype), mode="drop")
        return LayerCache(new_k, cache.v.at[at].set(v.astype(cache.v.dtype), mode="drop"))

    return tuple(write(number, cache) for number, cache in enumerate(caches))


def block(
    weights: Weights, spec: BlockSpec, caches: Caches, embedded: Array, start: Array
) -> Array:
    """The slots' states after the final norm [B, U, H], of embedded [B, U, H]: a text's newest
    token, at position start [B], then mask tokens. Cache row b is text b's."""
    body, x = spec.body, embedded
    positions = start[:, None] + jnp.arange(spec.slots)
    tables = rope_tables(body.rope, body.head_dim, positions)
    for number, (layer, cache) in enumerate(zip(body.layers, caches, strict=True)):
        own = layer_of(weights, number)
        seen = visible(layer, positions, start, cache.k.shape[1])
        x = layer_step(own, body, x, tables, partial(_attend, cache, seen))
    return rms_norm(x, weights["norm"], body.eps)


def layer_step(w: Weights, body: Body, x: Array, tables: Any, exchange: Exchange) -> Array:
    """One layer on the slots' states x [B, U, H]."""
    return (_gemma_layer if body.gemma else _qwen3_layer)(w, body, x, tables, exchange)


def embed(spec: BlockSpec, table: Array, anchor: Array) -> Array:
    """A block's tokens embedded [B, U, H]: anchor [B], then mask tokens."""
    masks = jnp.full((len(anchor), spec.slots - 1), spec.mask_id, anchor.dtype)
    tokens = jnp.concatenate([anchor[:, None], masks], 1)
    rows = table[jnp.where((tokens >= 0) & (tokens < table.shape[0]), tokens, 0)]
    return rows * jnp.asarray(spec.embedding_scale, rows.dtype)


def logits(spec: BlockSpec, head: Any, hidden: Array) -> Array:
    """States [..., H] -> [..., draft vocabulary] float32, before any chooser. A padded head
    has more rows than there are words."""
    found = project_wide(hidden, head).astype(jnp.float32)[..., : spec.draft_vocab]
    return found if spec.softcap is None else spec.softcap * jnp.tanh(found / spec.softcap)


class Visible(NamedTuple):
    """What each slot sees: context [B, U, S] of the cache's entries, block [B, U, U] of slots."""

    context: Array
    block: Array


def visible(layer: BlockLayer, positions: Array, start: Array, size: int) -> Visible:
    """Of slots at positions [B, U] behind a context of start [B] tokens, in a cache of
    `size` entries."""
    last = (start - 1)[:, None]
    held = (last - (last - jnp.arange(size)) % size)[:, None]  # [B, 1, S]
    query, slots = positions[..., None], jnp.arange(positions.shape[1])
    seen = jnp.broadcast_to(held >= 0, (*positions.shape, size))
    if layer.window is not None:
        seen &= held > query - layer.window
    within = slots[None] <= slots[:, None] if layer.causal else jnp.ones((len(slots),) * 2, bool)
    return Visible(seen, jnp.broadcast_to(within, (len(start), *within.shape)))


def layer_of(weights: Weights, number: int) -> Weights:
    """One layer's weights by their last names."""
    prefix = f"layers.{number}."
    return {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}


def keys_values(w: Weights, body: Body, x: Array, tables: Any) -> tuple[Array, Array]:
    """x [B, T, H] -> k, v [B, T, K, D]: of the features' context, or of a block's slots."""
    shape = (*x.shape[:-1], body.kv_heads, body.head_dim)
    raw = project(x, w["self_attn.k_proj"]).reshape(shape)
    k = rotate(rms_norm(raw, w["self_attn.k_norm"], body.eps), tables)
    if body.gemma:
        return k, rms_norm(raw, None, body.eps)
    return k, project(x, w["self_attn.v_proj"]).reshape(shape)


def _attention(w: Weights, body: Body, x: Array, tables: Any, exchange: Exchange) -> Array:
    """x [B, U, H], normed -> [B, U, H]."""
    shape = (*x.shape[:-1], body.heads, body.head_dim)
    q = rms_norm(project(x, w["self_attn.q_proj"]).reshape(shape), w["self_attn.q_norm"], body.eps)
    q = rotate(q, tables) * jnp.asarray(body.scale, q.dtype)
    mixed = exchange(q, *keys_values(w, body, x, tables))
    return project(mixed.astype(x.dtype), w["self_attn.o_proj"])


def _attend(cache: LayerCache, seen: Visible, q: Array, own_k: Array, own_v: Array) -> Array:
    """`Exchange` with a cache: one softmax over its entries and the block."""
    grouped = q.reshape(*q.shape[:2], own_k.shape[2], -1, q.shape[-1])
    parts = [
        jnp.where(mask[:, None, None], _scores(grouped, k), MASKED)
        for k, mask in ((cache.k, seen.context), (own_k, seen.block))
    ]
    shares = jax.nn.softmax(jnp.concatenate(parts, -1), -1).astype(q.dtype)
    before = cache.k.shape[1]
    mixed = _mix(shares[..., :before], cache.v) + _mix(shares[..., before:], own_v)
    return mixed.reshape(*q.shape[:2], -1)


def _scores(q: Array, k: Array) -> Array:
    """q [B, U, K, G, D], k [B, S, K, D] -> [B, K, G, U, S] float32."""
    return jnp.einsum("bukgd,bskd->bkgus", q, k.astype(q.dtype), preferred_element_type=jnp.float32)


def _mix(shares: Array, v: Array) -> Array:
    """[B, K, G, U, S] over v [B, S, K, D] -> [B, U, K, G, D] float32."""
    return jnp.einsum(
        "bkgus,bskd->bukgd", shares, v.astype(shares.dtype), preferred_element_type=jnp.float32
    )


def _qwen3_layer(w: Weights, body: Body, x: Array, tables: Any, exchange: Exchange) -> Array:
    normed = _norm(w, body, "input_layernorm", x)
    normed, after = convolved(w, "attention_conv", body.conv_group, normed)
    x = x + after(_attention(w, body, normed, tables, exchange))
    normed = _norm(w, body, "post_attention_layernorm", x)
    normed, after = convolved(w, "mlp_conv", body.conv_group, normed)
    gate = jax.nn.silu(project(normed, w["mlp.gate_proj"]))
    return x + after(project(gate * project(normed, w["mlp.up_proj"]), w["mlp.down_proj"]))


def _gemma_layer(w: Weights, body: Body, x: Array, tables: Any, exchange: Exchange) -> Array:
    mixed = _attention(w, body, _norm(w, body, "input_layernorm", x), tables, exchange)
    x = x + _norm(w, body, "post_attention_layernorm", mixed)
    normed = _norm(w, body, "pre_feedforward_layernorm", x)
    gate = jax.nn.gelu(project(normed, w["mlp.gate_proj"]), approximate=True)
    out = project(gate * project(normed, w["mlp.up_proj"]), w["mlp.down_proj"])
    return (x + _norm(w, body, "post_feedforward_layernorm", out)) * w["layer_scalar"]


def _norm(w: Weights, body: Body, name: str, x: Array) -> Array:
    return rms_norm(x, w[name], body.eps)
