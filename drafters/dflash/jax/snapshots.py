"""What a block drafter keeps of a slot for the prefix cache, beside the JAX target's snapshots: of
layers that see everything a chunk's entries, of sliding ones the rings at a boundary."""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from typing import Any

import jax
import numpy as np

from drafters.dflash.jax.body import Caches
from drafters.dflash.jax.drafter import BlockDraftHead
from specdec.core.types import Array, Sequence
from targets.jax.placing import replicated
from targets.jax.programs import bind
from targets.jax.snapshots import ArraySnapshot

Numbers = tuple[int, ...]
"""Layers, by number."""


class BlockSnapshots:
    """`Snapshots` of one head."""

    def __init__(self, head: BlockDraftHead, unit: int) -> None:
        """unit: tokens per chunk."""
        self.head, self.unit = head, unit
        layers = list(enumerate(head.placed.spec.body.layers))
        whole = tuple(i for i, layer in layers if layer.window is None)
        rings = tuple(i for i, layer in layers if layer.window is not None)
        mesh = head.target.mesh
        spread: dict[str, Any] = {} if mesh is None else {"out_shardings": replicated(mesh)}
        self._cut_chunk = jax.jit(bind(_cut_chunk, unit, whole), **spread)
        self._cut_rings = jax.jit(bind(_cut_rings, rings), **spread)
        self._put_chunk = jax.jit(bind(_put_chunk, whole), donate_argnums=0, **spread)
        self._put_rings = jax.jit(bind(_put_rings, rings), donate_argnums=0, **spread)

    def take_chunk(self, seq: Sequence, start: int, stop: int) -> ArraySnapshot:
        where = np.int32(seq.slot), np.int32(start)
        return ArraySnapshot.of(self._cut_chunk, self.head.memory, *where)

    def take_boundary(self, seq: Sequence, stop: int) -> ArraySnapshot:
        return ArraySnapshot.of(self._cut_rings, self.head.memory, np.int32(seq.slot))

    def restore(
        self,
        seq: Sequence,
        stop: int,
        chunks: Seqs[ArraySnapshot],
        boundary: ArraySnapshot,
    ) -> None:
        head, slot = self.head, np.int32(seq.slot)
        for number, chunk in enumerate(chunks):
            own = chunk.arrays()  # may fail, when the memory must be whole
            head.memory = self._put_chunk(head.memory, slot, np.int32(number * self.unit), own)
        head.memory = self._put_rings(head.memory, slot, boundary.arrays())


def _cut_chunk(unit: int, layers: Numbers, caches: Caches, slot: Array, start: Array) -> Any:
    """[unit, K, D] of each layer's keys and values."""

    def cut(part: Array) -> Array:
        size = 1, unit, *part.shape[2:]
        return jax.lax.dynamic_slice(part, (slot, start, 0, 0), size)[0]

    return jax.tree.map(cut, tuple(caches[i] for i in layers))


def _put_chunk(layers: Numbers, caches: Caches, slot: Array, start: Array, chunk: Any) -> Caches:
    def put(part: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice(part, new[None], (slot, start, 0, 0))

    return _replaced(layers, caches, chunk, put)


def _cut_rings(layers: Numbers, caches: Caches, slot: Array) -> Any:
    return jax.tree.map(lambda part: part[slot], tuple(caches[i] for i in layers))


def _put_rings(layers: Numbers, caches: Caches, slot: Array, rings: Any) -> Caches:
    return _replaced(layers, caches, rings, lambda part, new: part.at[slot].set(new))


def _replaced(layers: Numbers, caches: Caches, new: Any, put: Any) -> Caches:
    kept = list(caches)
    for i, own in zip(layers, new, strict=True):
        kept[i] = jax.tree.map(put, caches[i], own)
    return tuple(kept)
