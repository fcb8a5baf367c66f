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

from specdec.core.types import Array
from targets.arch import Arch, LayerSpec
from targets.jax.placing import zeros
from targets.layer_groups import layer_groups

TILE = 32
"""Entries of int8 in a TPU's tile. A slice that may begin within one makes XLA lay out the whole
cache anew, so that none may must show in the program: entries are sliced by tiles."""


class Rounded(NamedTuple):
    """Entries in int8: values [..., S, K, D], and one scale per entry and head, [..., K, S]
    float32. Entries are its minor axis: a TPU pads that to 128."""

    values: Array
    scale: Array


Entries = Array | Rounded


class LayerCache(NamedTuple):
    """k [repeats, slots, S, K, key_dims], v [repeats, slots, S, K, D] of one position of a
    layer group's pattern."""

    k: Entries
    v: Entries


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
    (0 leaves the row's cache untouched, fewer than T drops padding). reach [B, T]: the last
    position that each token sees on sliding layers, where that isn't its own (pictures).
    """

    first: Array | int
    start: Array
    count: Array
    reach: Array | None = None


def entries(layer: LayerSpec, max_len: int, slack: int) -> int:
    """Cache entries S of a layer, rounded up to whole tiles."""
    needed = min(layer.window or max_len, max_len) + slack
    return -(-needed // TILE) * TILE


def key_dims(layer: LayerSpec) -> int:
    """Dimensions of a key that are kept: where keys are RoPE(weight * values), those that turn,
    for the others are the values (layers.queries_in_parts)."""
    return 2 * layer.rope.rotated if layer.k_eq_v else layer.head_dim


def cached_heads(layer: LayerSpec, tp: int) -> int:
    """K/V heads in the cache: a layer that has fewer than devices, and divides them, is stored
    once per device, so that each holds and reads the one head that its queries need. Where the
    queries don't divide among the devices, they are all on each, and so are these."""
    spread = tp % layer.kv_heads == 0 and layer.heads % tp == 0
    return tp if spread else layer.kv_heads


def make_cache(
    arch: Arch, slots: int, max_len: int, slack: int, dtype: Any, mesh: Mesh | None = None
) -> Cache:
    """Zeros of the right shapes; kv heads are split over the mesh where they divide."""
    abstract = abstract_cache(arch, slots, max_len, slack, dtype, mesh)
    return jax.tree.map(lambda s: zeros(s.shape, s.dtype, s.sharding), abstract)


def abstract_cache(
    arch: Arch, slots: int, max_len: int, slack: int, dtype: Any, mesh: Mesh | None = None
) -> Cache:
    """Shapes, dtypes and shardings only. dtype: of keys and values; int8 makes them `Rounded`."""

    def one(shape: tuple[int, ...], kind: Any, heads: int | None = None) -> jax.ShapeDtypeStruct:
        if mesh is None:
            return jax.ShapeDtypeStruct(shape, kind)
        spec = PartitionSpec()
        if heads is not None and shape[heads] % mesh.shape["tp"] == 0:
            spec = PartitionSpec(*([None] * heads), "tp")
        return jax.ShapeDtypeStruct(shape, kind, sharding=NamedSharding(mesh, spec))

    def half(repeats: int, size: int, heads: int, dims: int) -> Any:
        values = one((repeats, slots, size, heads, dims), dtype, heads=3)
        if dtype != jnp.int8:
            return values
        return Rounded(values, one((repeats, slots, heads, size), jnp.float32, heads=2))

    def whole(layer: LayerSpec, repeats: int) -> LayerCache | None:
        if layer.kv_from is not None:
            return None
        size, tp = entries(layer, max_len, slack), mesh.shape["tp"] if mesh else 1
        common = repeats, size, cached_heads(layer, tp)
        return LayerCache(half(*common, key_dims(layer)), half(*common, layer.head_dim))

    layers = tuple(
        tuple(whole(layer, group.repeats) for layer in group.pattern)
        for group in layer_groups(arch)
    )
    return Cache(layers, one((slots, max_len + slack), jnp.int32))


def numbers(entries: Entries) -> Array:
    """The entries themselves [..., S, K, D], without their scale."""
    return entries.values if isinstance(entries, Rounded) else entries


def size(stored: Entries) -> int:
    """Entries S of a layer's cache."""
    return numbers(stored).shape[2]


def heads(stored: Entries) -> int:
    """K/V heads of a layer's cache."""
    return numbers(stored).shape[3]


def round_entries(new: Array) -> tuple[Array, Array]:
    """[..., D] to int8 and a scale [...] float32 that brings the largest to 127; the error is at
    most half a scale. Zeros stay zeros."""
    wide = new.astype(jnp.float32)
    scale = jnp.maximum(jnp.abs(wide).max(-1), jnp.finfo(jnp.float32).tiny) / 127
    return jnp.round(wide / scale[..., None]).astype(jnp.int8), scale


class Places(NamedTuple):
    """Where a call's tokens go: slot [B, 1], entry [B, T]; beyond the cache: nowhere."""

    slot: Array
    entry: Array


def places(span: Span, tokens: int, size: int) -> Places:
    """In a cache of `size` entries."""
    offset = jnp.arange(tokens)
    entry = jax.lax.rem(span.start[:, None] + offset, size)
    entry = jnp.where(offset < span.count[:, None], entry, size)
    return Places((span.first + jnp.arange(span.start.shape[0]))[:, None], entry)


def write(cache: Entries, repeat: Array | int, places: Places, new: Array) -> Any:
    """cache [repeats, slots, S, ...] with new [B, T, ...] at these places, in place."""
    if not isinstance(cache, Rounded):
        return _set(cache, (repeat, *places), new.astype(cache.dtype))
    values, scale = round_entries(new)
    return Rounded(
        _set(cache.values, (repeat, *places), values),
        _set(cache.scale, (repeat, places.slot, slice(None), places.entry), scale),
    )


def _set(array: Array, at: tuple, new: Array) -> Array:
    """No index is negative: to wrap one round takes three operations of each, in every layer."""
    return array.at[at].set(new, mode="drop", wrap_negative_indices=False)


def read(
    cache: Entries,
    repeat: Array | int,
    span: Span,
    begin: Array | int = 0,
    count: int | None = None,
) -> Entries:
    """The call's rows of one layer, entries begin .. begin + count - 1 (all): [B, count, ...].
    Both are multiples of TILE."""
    batch, whole = span.start.shape[0], size(cache)
    count = count or whole

    def cut(array: Array, axis: int, begin: Array | int, count: int) -> Array:
        start = [repeat, span.first, *([0] * (array.ndim - 2))]
        shape = [1, batch, *array.shape[2:]]
        start[axis], shape[axis] = begin, count
        return jax.lax.dynamic_slice(array, start, shape, allow_negative_indices=False)[0]

    if not isinstance(cache, Rounded):
        return cut(cache, 2, begin, count)
    scale = cut(cache.scale, 3, begin, count)
    if count == whole:
        return Rounded(cut(cache.values, 2, 0, whole), scale)
    repeats, slots, _, *rest = cache.values.shape
    tiles = cache.values.reshape(repeats, slots, whole // TILE, TILE, *rest)
    values = cut(tiles, 2, begin // TILE, count // TILE)
    return Rounded(values.reshape(batch, count, *rest), scale)


def visible(span: Span, tokens: int, entries: Array, size: int, window: int | None) -> Array:
    """[B, T, C]: may query start + t see entries [C], out of a cache of `size`? After `write`,
    entry s holds the highest fed position p with p = s mod size; it is seen iff 0 <= p and
    q - window < p <= q, on sliding layers q's reach in place of the second q."""
    last = (span.start + span.count - 1)[:, None]
    held = last - (last - entries) % size  # [B, C]
    query = (span.start[:, None] + jnp.arange(tokens))[..., None]  # [B, T, 1]
    held = held[:, None]
    if window is None:
        return (held >= 0) & (held <= query)
    last = query if span.reach is None else span.reach[..., None]
    return (held >= 0) & (held <= last) & (held > query - window)
