"""What a draft model keeps of a slot for the prefix cache: as the target, of its own K/V."""

from __future__ import annotations

from collections.abc import Sequence as Seqs

from drafters.model.host import ModelDrafter
from specdec.core.prefix_cache.snapshots import Snapshot, TargetSnapshots
from specdec.core.types import Sequence


class ModelSnapshots:
    """`Snapshots` of one drafter. What it lacks of a prompt, it reads again."""

    def __init__(self, drafter: ModelDrafter, own: TargetSnapshots) -> None:
        """own: the draft model's."""
        self.drafter, self.own = drafter, own

    def take_chunk(self, seq: Sequence, start: int, stop: int) -> Snapshot | None:
        return self.own.take_chunk(seq, start, stop) if self._has_read(seq, start, stop) else None

    def take_boundary(self, seq: Sequence, stop: int) -> Snapshot | None:
        return self.own.take_boundary(seq, stop) if self._has_read(seq, 0, stop) else None

    def restore(
        self,
        seq: Sequence,
        stop: int,
        chunks: Seqs[Snapshot | None],
        boundary: Snapshot | None,
    ) -> None:
        if boundary is not None and None not in chunks:
            self.own.restore(seq, stop, chunks, boundary)
            self.drafter.resume(seq, stop)

    def _has_read(self, seq: Sequence, start: int, stop: int) -> bool:
        """Whether it is just there: its chunks may be shorter than the target's, or its context."""
        whole = start % self.own.unit == 0 and stop % self.own.unit == 0
        return whole and self.drafter.prefilled(seq) == stop
