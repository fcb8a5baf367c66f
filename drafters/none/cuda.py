"""Plain decoding in the captured cycle."""

from __future__ import annotations

from collections.abc import Sequence as Seqs

from torch import Tensor

from specdec.core.types import CycleChoice, Proposal, Sequence, Step
from targets.cuda.device_drafter import CapturedBatch


class DeviceNone:
    """A `DeviceDrafter` that leaves the guesses as they were laid out: none."""

    def ready(self, seqs: Seqs[Sequence]) -> CycleChoice:
        return CycleChoice()

    def take_back(self) -> None:
        pass

    def propose(self, batch: CapturedBatch, k: int) -> Proposal:
        return Proposal(batch.draft)

    def observe(self, batch: CapturedBatch, step: Step, accepted: Tensor) -> None:
        pass
