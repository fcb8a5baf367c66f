"""Lookup in the captured cycle: the same guesses as `host.LookupTwin`, by a kernel of its own."""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from ctypes import c_int
from pathlib import Path

from torch import Tensor

from specdec.core.types import NO_GUESS, CycleChoice, Proposal, Sequence, Step
from targets.cuda.device_drafter import CapturedBatch
from targets.cuda.launch import Launcher, Library, Variant, pointer
from targets.cuda.target import CudaTarget

LOOKUP = Variant("lookup", folder=Path(__file__).parent / "sources")
THREADS = 1024


class DeviceLookup:
    """A `DeviceDrafter`: it reads the slots' own texts, there is nothing else to learn."""

    def __init__(self, target: CudaTarget, shortest: int, longest: int) -> None:
        """Suffixes of so many tokens."""
        self.target, self.lengths = target, (shortest, longest)
        self._launch = Launcher(Library({LOOKUP}))

    def ready(self, seqs: Seqs[Sequence]) -> CycleChoice:
        return CycleChoice()

    def take_back(self) -> None:
        pass

    def propose(self, batch: CapturedBatch, k: int) -> Proposal:
        history, rows = self.target.cache.tokens, batch.rows
        tensors = history, rows.start, rows.slot, rows.tokens
        arguments = [*map(pointer, tensors), *map(c_int, (history.stride(0), k, *self.lengths))]
        self._launch(LOOKUP, "lookup", (len(rows.slot), 1, 1), THREADS, arguments)
        if self.target.vision is not None:
            batch.draft.clamp_(min=NO_GUESS)  # pictures' places are below
        return Proposal(batch.draft)

    def observe(self, batch: CapturedBatch, step: Step, accepted: Tensor) -> None:
        pass
