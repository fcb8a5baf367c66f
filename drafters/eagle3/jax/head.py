"""The EAGLE-3 head's forward in JAX: the one definition that training and the drafter call.

At position p the head is fed the embedding of the token that the target chose from p's features,
and those features; it predicts the token after that one. When it drafts on, its own output takes
the features' place. Where keys and values go to and come from is a value, an `Exchange`.

Shape legend: B batch, T tokens, H hidden, F = layers * H, N query heads, K kv heads, D head_dim,
S cache entries, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from drafters.eagle3.spec import Head, HeadSpec
from specdec.core.types import Array
from targets.arch import Rope
from targets.jax.layers import attend, project, rms_norm, rope_tables, rotate
from targets.jax.placing import put, replicated, zeros

Weights = dict[str, Any]
"""Arrays by the names of `drafters.eagle3.spec.tensors`."""
Exchange = Callable[[Array, Array, Array], tuple[Any, Array]]
"""q [B, T, N, D] (scaled, rotated), k and v [B, T, K, D] -> (what is kept, mixed [B, T, N * D])."""
SPLIT = {
    "fc": (0, "hidden"),
    "self_attn.q_proj": (0, "heads"),
    "self_attn.o_proj": (1, "heads"),
    "mlp.gate_proj": (0, "ffw"),
    "mlp.up_proj": (0, "ffw"),
    "mlp.down_proj": (1, "ffw"),
    "lm_head": (0, "draft_vocab"),
}
"""Which axis of a weight is split over devices, and what of the spec must divide among them."""


class DraftCache(NamedTuple):
    """k, v [B, S, K * D]. Position p lives in entry p mod S, and is valid iff p < the row's length.
    Heads that see everything have an entry for each position; with a window they have a ring."""

    k: Array
    v: Array


def place(head: Head, dtype: Any, mesh: Mesh | None = None) -> tuple[Weights, Array]:
    """A head on the devices: weights in `dtype`, target ids [V] int32."""
    weights = {
        name: put(value.astype(dtype), sharding_of(name, head.spec, mesh))
        for name, value in head.weights.items()
    }
    return weights, put(head.target_ids.astype(np.int32), replicated(mesh))


def sharding_of(name: str, spec: HeadSpec, mesh: Mesh | None) -> NamedSharding | None:
    """Where a weight lives: split as in the target, what won't divide is on each device, and so is
    the cache: it is one layer's."""
    if mesh is None or name not in SPLIT:
        return replicated(mesh)
    axis, parts = SPLIT[name]
    if getattr(spec, parts) % mesh.shape["tp"]:
        return replicated(mesh)
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, "tp"))


def entries(spec: HeadSpec, longest: int, slack: int) -> int:
    """Cache entries S for texts of up to `longest` tokens. slack: the most that one call writes, or
    one cycle drafts: what that overwrites has left every window."""
    return longest if spec.window is None else min(longest, spec.window + slack)


def make_cache(
    spec: HeadSpec, rows: int, entries: int, dtype: Any, mesh: Mesh | None = None
) -> DraftCache:
    shape = (rows, entries, spec.kv_heads * spec.head_dim)
    k, v = (zeros(shape, dtype, replicated(mesh)) for _ in DraftCache._fields)
    return DraftCache(k, v)


def embed(table: Array, tokens: Array) -> Array:
    """The target's embeddings [..., H] of tokens [...], as stored: without Gemma's sqrt(H).
    Ids outside the vocabulary count as 0."""
    return table[jnp.where((tokens >= 0) & (tokens < table.shape[0]), tokens, 0)]


def fuse(weights: Weights, spec: HeadSpec, features: Array) -> Array:
    """The target's features [..., F] -> [..., H]. Never applied to the head's own output."""
    if spec.norm_before_fc:
        features = rms_norm(features, weights["input_norm"], spec.eps)
    if spec.fc_norm:
        parts = jnp.split(features, len(spec.layers), -1)
        normed = [rms_norm(x, weights[f"fc_norm.{i}"], spec.eps) for i, x in enumerate(parts)]
        features = jnp.concatenate(normed, -1)
    return project(features, weights["fc"])


def layer(
    weights: Weights,
    spec: HeadSpec,
    embedded: Array,
    hidden: Array,
    positions: Array,
    exchange: Exchange,
) -> tuple[Any, Array]:
    """The one decoder layer: embedded and hidden [B, T, H] at positions [B, T] (or [1, T]).

    -> (what `exchange` keeps, output [B, T, H]: for `logits`, and by `feedback` the next step).
    """
    normed = rms_norm(hidden, weights["hidden_norm"], spec.eps)
    both = [rms_norm(embedded, weights["input_layernorm"], spec.eps), normed]
    kept, mixed = exchange(*_projections(weights, spec, jnp.concatenate(both, -1), positions))
    residual = normed if spec.norm_before_residual else hidden
    out = residual + project(mixed, weights["self_attn.o_proj"])
    return kept, out + _mlp(
        weights, spec, rms_norm(out, weights["post_attention_layernorm"], spec.eps)
    )


def logits(weights: Weights, spec: HeadSpec, out: Array) -> Array:
    """The layer's output [..., H] -> [..., V] float32 over draft ids; no soft-cap."""
    normed = rms_norm(out, weights["norm"], spec.eps)
    return project(normed, weights["lm_head"]).astype(jnp.float32)


def feedback(weights: Weights, spec: HeadSpec, out: Array) -> Array:
    """What the next draft step is fed in the features' place [..., H]."""
    return rms_norm(out, weights["norm"], spec.eps) if spec.norm_output else out


def decode(
    weights: Weights,
    spec: HeadSpec,
    cache: DraftCache,
    embedded: Array,
    hidden: Array,
    positions: Array,
) -> tuple[DraftCache, Array]:
    """Draft: write entries at positions [B, T], attend to all up to each. -> (cache, [B, T, H]).

    A negative position, or one past a cache without a window, writes nothing; its output means
    nothing.
    """

    def exchange(q: Array, k: Array, v: Array) -> tuple[DraftCache, Array]:
        size = cache.k.shape[1]
        row = jnp.arange(positions.shape[0])[:, None]
        entry = positions if spec.window is None else positions % size
        where = jnp.where(positions < 0, size, entry)  # out of range: dropped
        flat = (*positions.shape, -1)
        new_k = cache.k.at[row, where].set(k.reshape(flat).astype(cache.k.dtype), mode="drop")
        new_v = cache.v.at[row, where].set(v.reshape(flat).astype(cache.v.dtype), mode="drop")
        seen = _visible(spec, positions, _held(spec, positions, size))
        kept = DraftCache(new_k, new_v)
        return kept, _attend_heads(spec, q, kept, seen)

    return layer(weights, spec, embedded, hidden, positions, exchange)


def _attend_heads(spec: HeadSpec, q: Array, cache: DraftCache, seen: Array) -> Array:
    """Head by head, each a range of lanes: any other way a TPU copies the cache first."""
    queries = jnp.split(q, spec.kv_heads, 2)
    keys, values = (jnp.split(leaf, spec.kv_heads, -1) for leaf in cache)
    mixed = [
        attend(q, k[:, :, None], v[:, :, None], seen)
        for q, k, v in zip(queries, keys, values, strict=True)
    ]
    return jnp.concatenate(mixed, -1)


class Unrolled(NamedTuple):
    """Keys and values of the steps so far, newest last: lists of [B, T, K, D]."""

    k: tuple[Array, ...]
    v: tuple[Array, ...]


def unroll(
    weights: Weights,
    spec: HeadSpec,
    before: Unrolled,
    embedded: Array,
    hidden: Array,
    documents: Array,
) -> tuple[Unrolled, Array]:
    """Train: one draft step from every position at once. documents [B, T] int32: positions of
    different documents don't see each other. -> (keys and values with this step's, [B, T, H]).

    Row i at step n sees step 0 up to i, and of each later step its own entry only: what a draft
    that began at i would have in its cache.
    """
    step, tokens = len(before.k), embedded.shape[1]

    def exchange(q: Array, k: Array, v: Array) -> tuple[Unrolled, Array]:
        kept = Unrolled((*before.k, k), (*before.v, v))
        ahead = jnp.arange(tokens)[None]
        seen = _visible(spec, ahead, ahead) & (documents[:, :, None] == documents[:, None])
        return kept, _attend_unrolled(q, kept, seen)

    positions = jnp.arange(tokens)[None] + step
    return layer(weights, spec, embedded, hidden, positions, exchange)


def _held(spec: HeadSpec, positions: Array, size: int) -> Array:
    """The position of each of `size` entries [B or 1, S] once `positions` [B, T] are written. What
    a rejected draft left in a ring lies behind them; what it overwrote had left every window."""
    entry = jnp.arange(size)[None]
    if spec.window is None:
        return entry
    last = positions.max(1, keepdims=True)
    held = last - (last - entry) % size
    return jnp.where(held < 0, jnp.iinfo(jnp.int32).max, held)


def _visible(spec: HeadSpec, queries: Array, keys: Array) -> Array:
    """[B, T, S] for query positions [B, T] and key positions [B, S]."""
    ahead = queries[:, :, None] - keys[:, None]
    return (ahead >= 0) if spec.window is None else (ahead >= 0) & (ahead < spec.window)


def _projections(
    weights: Weights, spec: HeadSpec, both: Array, positions: Array
) -> tuple[Array, Array, Array]:
    tables = rope_tables(Rope(spec.theta, spec.head_dim // 2), spec.head_dim, positions)

    def heads(name: str) -> Array:
        flat = project(both, weights[f"self_attn.{name}_proj"])
        return flat.reshape(*flat.shape[:-1], -1, spec.head_dim)

    scale = jnp.asarray(spec.head_dim**-0.5, both.dtype)
    return rotate(heads("q"), tables) * scale, rotate(heads("k"), tables), heads("v")


def _mlp(weights: Weights, spec: HeadSpec, x: Array) -> Array:
    gate = project(x, weights["mlp.gate_proj"])
    gate = jax.nn.silu(gate) if spec.silu else jax.nn.gelu(gate, approximate=True)
    return project(gate * project(x, weights["mlp.up_proj"]), weights["mlp.down_proj"])


def _attend_unrolled(q: Array, kept: Unrolled, seen: Array) -> Array:
    """Step 0 by position, later steps by their diagonal, one softmax over both: [B, T, N * D]."""
    batch, tokens, heads, dim = q.shape
    grouped = q.reshape(batch, tokens, kept.k[0].shape[2], -1, dim)
    wide = {"preferred_element_type": jnp.float32}
    first = jnp.einsum("btkgd,bskd->btkgs", grouped, kept.k[0], **wide)
    first = jnp.where(seen[:, :, None, None], first, -jnp.inf)  # a position always sees itself
    own = [jnp.einsum("btkgd,btkd->btkg", grouped, k, **wide)[..., None] for k in kept.k[1:]]
    shares = jax.nn.softmax(jnp.concatenate([first, *own], -1), -1).astype(q.dtype)
    mixed = jnp.einsum("btkgs,bskd->btkgd", shares[..., :tokens], kept.v[0], **wide)
    for n, v in enumerate(kept.v[1:]):
        mixed = mixed + shares[..., tokens + n, None].astype(jnp.float32) * v[:, :, :, None]
    return mixed.astype(q.dtype).reshape(batch, tokens, heads * dim)
