"""What the JAX target keeps of a slot for the prefix cache: copies by programs of fixed shapes.

A chunk is cut out of the global layers, a boundary is the rings as they are. Arrays are functional
here: a snapshot is arrays of its own, and putting it back is a program that takes the cache's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence as Seqs
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from specdec.core.types import Array, Sequence
from targets.jax.cache import TILE, Cache, Entries, Rounded, numbers
from targets.jax.out_of_memory import catching_oom
from targets.jax.programs import bind
from targets.jax.target import JaxTarget
from targets.layer_groups import layer_groups

SNAPSHOT = "a snapshot of a prompt"
"""What needs the memory, in an error."""
SPARE = 0.9
"""Share of the memory that was never in use which is called spare."""

Places = tuple[tuple[int, int], ...]
"""Places of layers in `Cache.layers`: group, and position in its pattern."""


class HostArray:
    """An array's shards on this process's devices, in host memory."""

    def __init__(self, array: Array) -> None:
        self._like = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        self._spread = len(array.sharding.device_set) > 1
        self._shards = [(s.device, np.asarray(s.data)) for s in array.addressable_shards]

    @property
    def nbytes(self) -> int:
        return sum(values.nbytes for _, values in self._shards)

    def on_device(self) -> Array:
        if not self._spread:  # not tied to its device, as what programs make is not
            return jax.device_put(self._shards[0][1])
        parts = [jax.device_put(values, device) for device, values in self._shards]
        like = self._like
        return jax.make_array_from_single_device_arrays(like.shape, like.sharding, parts)


@dataclass(frozen=True)
class ArraySnapshot:
    """`Snapshot` of a tree of arrays, or of `HostArray`s."""

    tree: Any

    @classmethod
    @catching_oom(SNAPSHOT)
    def of(cls, copy: Callable[..., Any], *given: Any) -> ArraySnapshot:
        """What a program makes of these. Raises MemoryError."""
        return cls(copy(*given))

    @property
    def device_bytes(self) -> int:
        """Bytes on each device."""
        return sum(map(_per_device, jax.tree.leaves(self.tree)))

    @property
    def host_bytes(self) -> int:
        return sum(
            leaf.nbytes if isinstance(leaf, HostArray) else _on_all(leaf)
            for leaf in jax.tree.leaves(self.tree)
        )

    def to_host(self) -> ArraySnapshot:
        return ArraySnapshot(jax.tree.map(HostArray, self.tree))

    @catching_oom(SNAPSHOT)
    def arrays(self) -> Any:
        """The tree on the device. Raises MemoryError."""

        def here(leaf: Any) -> Any:
            return leaf.on_device() if isinstance(leaf, HostArray) else leaf

        return jax.tree.map(here, self.tree)


def _per_device(leaf: Array) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _on_all(leaf: Array) -> int:
    return len(leaf.sharding.addressable_devices) * _per_device(leaf)


class SlotSnapshots:
    """`TargetSnapshots` of one target."""

    def __init__(self, target: JaxTarget) -> None:
        self.target = target
        self.unit = math.lcm(target.plan.chunk, TILE)
        layers = [
            ((s, j), layer)
            for s, group in enumerate(layer_groups(target.arch))
            for j, layer in enumerate(group.pattern)
            if layer.kv_from is None
        ]
        self._global = tuple(place for place, layer in layers if layer.window is None)
        self._rings = tuple(place for place, layer in layers if layer.window is not None)
        self._take_chunk = jax.jit(bind(_cut_chunk, self.unit))
        self._take_rings = jax.jit(_cut_rings)
        self._put_chunk = self._writer(_put_chunk, self._global)
        self._put_rings = self._writer(_put_rings, self._rings)
        self._put_text = self._donating(_put_text, target.cache.tokens)

    def spare_bytes(self) -> int:
        found = [device.memory_stats() for device in jax.local_devices()]
        spare = [stats["bytes_limit"] - stats["peak_bytes_in_use"] for stats in found if stats]
        return max(0, int(SPARE * min(spare))) if spare else 0

    def take_chunk(self, seq: Sequence, start: int, stop: int) -> ArraySnapshot:
        layers = _of(self.target.cache, self._global)
        return ArraySnapshot.of(self._take_chunk, layers, np.int32(seq.slot), np.int32(start))

    def take_boundary(self, seq: Sequence, stop: int) -> ArraySnapshot:
        layers = _of(self.target.cache, self._rings)
        return ArraySnapshot.of(self._take_rings, layers, np.int32(seq.slot))

    def restore(
        self,
        seq: Sequence,
        stop: int,
        chunks: Seqs[ArraySnapshot],
        boundary: ArraySnapshot,
    ) -> None:
        self.target.seat(seq)
        slot = np.int32(seq.slot)
        for number, chunk in enumerate(chunks):
            self._put_chunk(slot, np.int32(number * self.unit), chunk.arrays())
        self._put_rings(slot, boundary.arrays())
        cache = self.target.cache
        text = np.zeros(cache.tokens.shape[1], np.int32)
        text[:stop] = seq.tokens[:stop]
        self.target.cache = cache._replace(tokens=self._put_text(cache.tokens, slot, text))

    def _writer(self, put: Callable[..., Any], places: Places) -> Callable[..., None]:
        """`put` on these layers of the target's cache."""
        program = self._donating(put, _of(self.target.cache, places))

        def write(*values: Any) -> None:
            cache = self.target.cache
            self.target.cache = _with(cache, places, program(_of(cache, places), *values))

        return write

    def _donating(self, put: Callable[..., Any], like: Any) -> Callable[..., Any]:
        """`put` compiled: its first argument, arrays as `like`, is updated in place."""
        if self.target.mesh is None:
            return jax.jit(put, donate_argnums=0)
        where = jax.tree.map(lambda leaf: leaf.sharding, like)
        return jax.jit(put, donate_argnums=0, out_shardings=where)


def _of(cache: Cache, places: Places) -> Any:
    return tuple(cache.layers[s][j] for s, j in places)


def _with(cache: Cache, places: Places, new: Any) -> Cache:
    layers = [list(group) for group in cache.layers]
    for (s, j), layer in zip(places, new, strict=True):
        layers[s][j] = layer
    return cache._replace(layers=tuple(map(tuple, layers)))


def _entries(leaf: Any) -> bool:
    return isinstance(leaf, Rounded) or not isinstance(leaf, tuple)


def _cut_chunk(unit: int, layers: Any, slot: Array, start: Array) -> Any:
    """[repeats, unit / TILE, TILE, K, D] of each, and scales [repeats, K, unit]."""

    def cut(stored: Entries) -> Any:
        tiles = _tiled(numbers(stored))
        values = _slice(tiles, {1: (slot, 1), 2: (start // TILE, unit // TILE)})[:, 0]
        if not isinstance(stored, Rounded):
            return values
        return Rounded(values, _slice(stored.scale, {1: (slot, 1), 3: (start, unit)})[:, 0])

    return jax.tree.map(cut, layers, is_leaf=_entries)


def _put_chunk(layers: Any, slot: Array, start: Array, chunk: Any) -> Any:
    def put(stored: Entries, new: Any) -> Any:
        values, own = numbers(stored), numbers(new)
        rows = own.reshape(own.shape[0], 1, -1, *own.shape[3:])
        place = (0, slot, start // TILE * TILE, *[0] * (values.ndim - 3))
        values = jax.lax.dynamic_update_slice(values, rows, place)
        if not isinstance(stored, Rounded):
            return values
        place = (0, slot, 0, start)
        scale = jax.lax.dynamic_update_slice(stored.scale, new.scale[:, None], place)
        return Rounded(values, scale)

    return jax.tree.map(put, layers, chunk, is_leaf=_entries)


def _cut_rings(layers: Any, slot: Array) -> Any:
    return jax.tree.map(lambda leaf: _slice(leaf, {1: (slot, 1)})[:, 0], layers)


def _put_rings(layers: Any, slot: Array, rings: Any) -> Any:
    return jax.tree.map(lambda all_, one: all_.at[:, slot].set(one), layers, rings)


def _put_text(tokens: Array, slot: Array, text: Array) -> Array:
    return tokens.at[slot].set(text)


def _tiled(values: Array) -> Array:
    """[repeats, slots, S, ...] with S in whole tiles, so that slices are seen not to cut one."""
    repeats, slots, entries, *rest = values.shape
    return values.reshape(repeats, slots, entries // TILE, TILE, *rest)


def _slice(array: Array, parts: dict[int, tuple[Array, int]]) -> Array:
    """parts: axis -> (first, count)."""
    start = [parts[axis][0] if axis in parts else 0 for axis in range(array.ndim)]
    shape = [parts[axis][1] if axis in parts else array.shape[axis] for axis in range(array.ndim)]
    return jax.lax.dynamic_slice(array, start, shape)


def snapshots_of(target: JaxTarget) -> SlotSnapshots:
    """`targets.backend.snapshots_of`."""
    return SlotSnapshots(target)
