"""What a block drafter keeps of a slot for the prefix cache, beside the CUDA target's snapshots: of
layers that see everything a chunk's entries, of sliding ones the rings at a boundary."""

from __future__ import annotations

from collections.abc import Sequence as Seqs

import torch

from drafters.dflash.cuda.body import LayerCache
from drafters.dflash.cuda.drafter import BlockDraftHead
from specdec.core.types import Sequence
from targets.cuda.snapshots import TensorSnapshot


class BlockSnapshots:
    """`Snapshots` of one head."""

    def __init__(self, head: BlockDraftHead) -> None:
        caches, spec = head.inputs.caches, head.inputs.model.spec
        pairs = list(zip(spec.body.layers, caches, strict=True))
        self._whole = [cache for layer, cache in pairs if layer.window is None]
        self._rings = [cache for layer, cache in pairs if layer.window is not None]

    def take_chunk(self, seq: Sequence, start: int, stop: int) -> TensorSnapshot | None:
        if not self._whole:
            return None
        return TensorSnapshot.of(_entries(self._whole, seq.slot, slice(start, stop)))

    def take_boundary(self, seq: Sequence, stop: int) -> TensorSnapshot | None:
        if not self._rings:
            return None
        return TensorSnapshot.of(_entries(self._rings, seq.slot, slice(None)))

    @torch.inference_mode()
    def restore(
        self,
        seq: Sequence,
        stop: int,
        chunks: Seqs[TensorSnapshot | None],
        boundary: TensorSnapshot | None,
    ) -> None:
        unit = stop // len(chunks)
        for number, chunk in enumerate(chunks):
            if chunk is not None:
                _put(self._whole, seq.slot, slice(number * unit, (number + 1) * unit), chunk)
        if boundary is not None:
            _put(self._rings, seq.slot, slice(None), boundary)


def _entries(caches: list[LayerCache], slot: int, places: slice) -> list[torch.Tensor]:
    return [part[slot, :, places] for cache in caches for part in cache]


def _put(caches: list[LayerCache], slot: int, places: slice, snapshot: TensorSnapshot) -> None:
    own = _entries(caches, slot, places)
    for part, kept in zip(own, snapshot.tensors(), strict=True):
        part.copy_(kept)
