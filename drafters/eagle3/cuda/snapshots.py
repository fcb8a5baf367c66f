"""What an EAGLE-3 head keeps of a slot for the prefix cache, beside the CUDA target's snapshots.
`../jax/snapshots.py` is its JAX counterpart; it explains why entries lie one place earlier than the
target's."""

from __future__ import annotations

from collections.abc import Sequence as Seqs

import torch

from drafters.eagle3.cuda import draft as drafting
from drafters.eagle3.cuda.drafter import EagleDraftHead
from specdec.core.types import Sequence
from targets.cuda import cache as kv
from targets.cuda.out_of_memory import catching_oom
from targets.cuda.snapshots import SNAPSHOT, TensorSnapshot


class EagleSnapshots:
    """`Snapshots` of one head. Nothing is kept beyond the head's context."""

    def __init__(self, head: EagleDraftHead) -> None:
        self.inputs, self.head = head.inputs, head.inputs.head

    @catching_oom(SNAPSHOT)
    @torch.inference_mode()
    def take_chunk(self, seq: Sequence, start: int, stop: int) -> TensorSnapshot | None:
        if stop > self.head.longest:
            return None
        cache = self.head.layer.cache
        first = max(0, start - 1, stop - 1 - cache.size)  # a ring has the last ones alone
        return TensorSnapshot.of(kv.read(cache, seq.slot, first, stop - 1))

    @catching_oom(SNAPSHOT)
    @torch.inference_mode()
    def take_boundary(self, seq: Sequence, stop: int) -> TensorSnapshot | None:
        """The features of its last row: they are pending where a prompt was just read."""
        if stop > self.head.longest:
            return None
        return TensorSnapshot.of([self.inputs.pending.features[seq.slot, 0]])

    @catching_oom(SNAPSHOT)
    @torch.inference_mode()
    def restore(
        self,
        seq: Sequence,
        stop: int,
        chunks: Seqs[TensorSnapshot | None],
        boundary: TensorSnapshot | None,
    ) -> None:
        if boundary is None:
            return
        unit = stop // len(chunks)
        for number, chunk in enumerate(chunks, 1):
            assert chunk is not None, "a boundary is kept, and so are its chunks"
            k, v = (part.transpose(0, 1) for part in chunk.tensors())
            kv.write(self.head.layer.cache, seq.slot, number * unit - 1 - len(k), k, v)
        (row,) = boundary.tensors()
        drafting.read(self.inputs, seq.slot, stop - 1, row[None, None], [seq.tokens[stop]])
