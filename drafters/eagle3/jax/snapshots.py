"""What an EAGLE-3 head keeps of a slot for the prefix cache, beside the JAX target's snapshots.

Entry p is of the target's features at p and the token at p + 1. So the entry at a chunk's end
depends on what follows, and belongs to the next chunk: a chunk's are those one place earlier than
the target's. The last one is made anew, of the features that the boundary keeps and the token that
the prompt at hand has there; where that is a picture's place, once more with the picture's chunk.
"""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drafters.eagle3.jax.drafter import EagleDraftHead
from drafters.eagle3.jax.head import DraftCache
from specdec.core.types import Array, Sequence
from targets.jax.placing import replicated
from targets.jax.programs import bind
from targets.jax.snapshots import ArraySnapshot


class EagleSnapshots:
    """`Snapshots` of one head. Nothing is kept from where it guesses nothing any more."""

    def __init__(self, head: EagleDraftHead, unit: int) -> None:
        """unit: tokens per chunk."""
        self.head, self.unit = head, unit
        mesh = head.target.mesh
        whole: dict[str, Any] = {} if mesh is None else {"out_shardings": replicated(mesh)}
        self._cut = jax.jit(bind(_cut, unit), **whole)
        self._put = jax.jit(_put, donate_argnums=0, **whole)
        self._row = jax.jit(_row, **whole)
        self._first_row = jax.jit(_first_row, static_argnums=1, **whole)

    def take_chunk(self, seq: Sequence, start: int, stop: int) -> ArraySnapshot | None:
        if stop > self.head.longest:
            return None
        cache = self.head.memory.cache
        return ArraySnapshot.of(self._cut, cache, np.int32(seq.slot), _first(start))

    def take_boundary(self, seq: Sequence, stop: int) -> ArraySnapshot | None:
        """The features of its last row: they are pending where a prompt was just read."""
        if stop > self.head.longest:
            return None
        features = self.head.memory.pending.features
        return ArraySnapshot.of(self._row, features, np.int32(seq.slot))

    def restore(
        self,
        seq: Sequence,
        stop: int,
        chunks: Seqs[ArraySnapshot | None],
        boundary: ArraySnapshot | None,
    ) -> None:
        head, slot = self.head, np.int32(seq.slot)
        if boundary is None:
            return
        for number, chunk in enumerate(chunks):
            assert chunk is not None, "a boundary is kept, and so are its chunks"
            own = chunk.arrays()  # may fail, when the memory must be whole
            cache = self._put(head.memory.cache, slot, _first(number * self.unit), own)
            head.memory = replace(head.memory, cache=cache)
        width = head.target.prefill_chunk
        features = self._first_row(boundary.arrays(), width)
        head.read(seq.slot, features, seq.tokens[stop : stop + 1], stop - 1)


def _first(start: int) -> np.int32:
    """The first chunk has nothing before it; its last entry is overwritten by the second's."""
    return np.int32(max(0, start - 1))


def _cut(unit: int, cache: DraftCache, slot: Array, first: Array) -> DraftCache:
    """[unit, K * D] of each."""
    entry = _entries(cache, first, unit)
    return DraftCache(*(part[slot, entry] for part in cache))


def _put(cache: DraftCache, slot: Array, first: Array, chunk: DraftCache) -> DraftCache:
    entry = _entries(cache, first, len(chunk.k))
    return DraftCache(
        *(part.at[slot, entry].set(new) for part, new in zip(cache, chunk, strict=True))
    )


def _entries(cache: DraftCache, first: Array, count: int) -> Array:
    """Where positions from `first` on lie."""
    return (first + jnp.arange(count)) % cache.k.shape[1]


def _row(features: Array, slot: Array) -> Array:
    return features[slot, 0]


def _first_row(row: Array, width: int) -> Array:
    """[F] as the first of a chunk's features [1, width, F]."""
    return jnp.zeros((1, width, row.shape[0]), row.dtype).at[0, 0].set(row)
