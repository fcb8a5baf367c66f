"""The KV cache as a pytree: batch axis, per-row positions, rings for sliding layers.

A position p lives in entry p mod S, always: on global layers S exceeds every position, on sliding
ones S = window + slack, so that what a rejected draft overwrote had already left the window. An
entry is valid iff its position is below the sequence's length: the length is the rollback.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specdec.types import Array
from targets.arch import Arch, LayerSpec
from targets.segments import segments


class LayerCache(NamedTuple):
    """k, v [repeats, slots, S, K, D] of one position of a segment's pattern."""

    k: Array
    v: Array


class Cache(NamedTuple):
    """layers[s][j]: a LayerCache, or None where the layer shares another's K/V.

    tokens [slots, max_len + slack] int32: what was fed at each position (penalties and the
    device n-gram read it; valid below the length, like K/V).
    """

    layers: tuple[tuple[LayerCache | None, ...], ...]
    tokens: Array


class Span(NamedTuple):
    """Which rows of the cache a call feeds, and where.

    first: the first slot (traced or not); the call's B rows are slots first .. first + B - 1.
    start [B]: position of each row's first token. count [B]: how many of its T tokens to write
    (0 leaves the row's cache untouched, fewer than T drops padding).
    """

    first: Array | int
    start: Array
    count: Array


def entries(layer: LayerSpec, max_len: int, slack: int) -> int:
    """Cache entries S of a layer, rounded up to a multiple of 8 lanes."""
    needed = min(layer.window or max_len, max_len) + slack
    return -(-needed // 8) * 8


def cached_heads(layer: LayerSpec, tp: int) -> int:
    """K/V heads in the cache: a layer that has fewer than devices, and divides them, is stored
    once per device, so that each holds and reads the one head that its queries need. Where the
    queries don't divide among the devices, they are all on each, and so are these."""
    spread = tp % layer.kv_heads == 0 and layer.heads % tp == 0
    return tp if spread else layer.kv_heads


def _layer_shapes(arch: Arch, slots: int, max_len: int, slack: int, tp: int) -> Any:
    def shape(layer: LayerSpec, repeats: int) -> tuple[int, ...] | None:
        if layer.kv_from is not None:
            return None
        return (
            repeats,
            slots,
            entries(layer, max_len, slack),
            cached_heads(layer, tp),
            layer.head_dim,
        )

    return tuple(
        tuple(shape(layer, segment.repeats) for layer in segment.pattern)
        for segment in segments(arch)
    )


def make_cache(
    arch: Arch, slots: int, max_len: int, slack: int, dtype: Any, mesh: Mesh | None = None
) -> Cache:
    """Zeros of the right shapes; kv heads are split over the mesh where they divide."""
    abstract = abstract_cache(arch, slots, max_len, slack, dtype, mesh)
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), abstract)


def abstract_cache(
    arch: Arch, slots: int, max_len: int, slack: int, dtype: Any, mesh: Mesh | None = None
) -> Cache:
    def place(shape: tuple[int, ...]) -> NamedSharding | None:
        if mesh is None:
            return None
        split = "tp" if len(shape) == 5 and shape[3] % mesh.shape["tp"] == 0 else None
        return NamedSharding(
            mesh, PartitionSpec(*([None] * 3), split) if split else PartitionSpec()
        )

    def one(shape: tuple[int, ...], kind: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, kind, sharding=place(shape))

    layers = tuple(
        tuple(s and LayerCache(one(s, dtype), one(s, dtype)) for s in pattern)
        for pattern in _layer_shapes(arch, slots, max_len, slack, mesh.shape["tp"] if mesh else 1)
    )
    return Cache(layers, one((slots, max_len + slack), jnp.int32))


def write(cache: Array, group: Array | int, span: Span, new: Array) -> Array:
    """cache [repeats, slots, S, ...] with new [B, T, ...] at its rows' positions, in place."""
    batch, tokens = new.shape[:2]
    size = cache.shape[2]
    offset = jnp.arange(tokens)
    entry = (span.start[:, None] + offset) % size
    entry = jnp.where(offset < span.count[:, None], entry, size)  # out of range: dropped
    slot = span.first + jnp.arange(batch)
    return cache.at[group, slot[:, None], entry].set(new.astype(cache.dtype), mode="drop")


def read(cache: Array, group: Array | int, span: Span) -> Array:
    """The call's rows of one layer: [B, S, ...]."""
    batch = span.start.shape[0]
    start = (group, span.first, *([0] * (cache.ndim - 2)))
    return jax.lax.dynamic_slice(cache, start, (1, batch, *cache.shape[2:]))[0]


def visible(span: Span, tokens: int, size: int, window: int | None) -> Array:
    """[B, T, S]: may query start + t see the entry? After `write`, entry s holds the highest
    fed position p with p = s mod S; it is seen iff 0 <= p, q - window < p <= q."""
    last = (span.start + span.count - 1)[:, None]
    held = last - (last - jnp.arange(size)) % size  # [B, S]
    query = (span.start[:, None] + jnp.arange(tokens))[..., None]  # [B, T, 1]
    held = held[:, None]
    seen = (held >= 0) & (held <= query)
    return seen if window is None else seen & (held > query - window)
