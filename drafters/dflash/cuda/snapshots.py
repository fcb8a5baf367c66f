"""What a block drafter keeps of a slot for the prefix cache, beside the CUDA target's snapshots: of
layers that see everything a chunk's entries, of sliding ones the rings at a boundary."""

from __future__ import annotations

from collections.abc import Sequence as Seqs

import torch

from drafters.dflash.cuda.drafter import BlockDraftHead
from specdec.core.types import Sequence
from targets.cuda import cache as kv
from targets.cuda.out_of_memory import catching_oom
from targets.cuda.snapshots import SNAPSHOT, TensorSnapshot


class BlockSnapshots:
    """`Snapshots` of one head."""

    def __init__(self, head: BlockDraftHead) -> None:
        caches, spec = head.inputs.caches, head.inputs.model.spec
        pairs = list(zip(spec.body.layers, caches, strict=True))
        self._whole = [cache for layer, cache in pairs if layer.window is None]
        self._rings = [cache for layer, cache in pairs if layer.window is not None]

    @catching_oom(SNAPSHOT)
    @torch.inference_mode()
    def take_chunk(self, seq: Sequence, start: int, stop: int) -> TensorSnapshot | None:
        if not self._whole:
            return None
        parts = (kv.read(cache, seq.slot, start, stop) for cache in self._whole)
        return TensorSnapshot.of([part for pair in parts for part in pair])

    @catching_oom(SNAPSHOT)
    @torch.inference_mode()
    def take_boundary(self, seq: Sequence, stop: int) -> TensorSnapshot | None:
        return TensorSnapshot.of(self._turned(seq.slot)) if self._rings else None

    @catching_oom(SNAPSHOT)
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
            parts = iter(() if chunk is None else chunk.tensors())
            for cache, k, v in zip(self._whole, parts, parts, strict=False):
                own = (part.transpose(0, 1) for part in (k, v))
                kv.write(cache, seq.slot, number * unit, *own)
        if boundary is not None:
            for part, kept in zip(self._turned(seq.slot), boundary.tensors(), strict=True):
                part.copy_(kept)

    def _turned(self, slot: int) -> list[torch.Tensor]:
        """The rings of a slot."""
        return [part[slot] for cache in self._rings for part in (cache.k, cache.v)]
