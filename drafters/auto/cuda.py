"""Several drafters as one in the captured cycle: prompt lookup, and one with weights. Whose guesses
each row takes is a tensor that the host writes before a cycle (`late.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seqs

import numpy as np
import torch
from torch import Tensor

from drafters.auto.late import TEXT, WEIGHTS, LateChooser
from specdec.core.types import NO_GUESS, Sequence, Step
from targets.cuda.device_drafter import CapturedBatch, DeviceDrafter
from targets.cuda.upload import page_locked


class DeviceAuto:
    """A `DeviceDrafter`. One graph where the drafter with weights guesses, one where it does not,
    one where nobody does; it learns from every cycle in each."""

    def __init__(
        self, chooser: LateChooser, text: DeviceDrafter, weighted: DeviceDrafter | None
    ) -> None:
        self._chooser, self._text, self._weighted = chooser, text, weighted
        self._take: Tensor | None = None
        self._told = np.empty(0, np.int32)
        """What it holds."""
        self.by: Tensor | None = None
        """[B]: whose the last guesses of a row are; None where it has none."""

    def with_weighted(self, wrap: Callable[[DeviceDrafter], DeviceDrafter]) -> DeviceAuto:
        """The same, the drafter with weights wrapped."""
        weighted = None if self._weighted is None else wrap(self._weighted)
        return DeviceAuto(self._chooser, self._text, weighted)

    @property
    def names(self) -> dict[int, str]:
        """The drafters by their numbers in `by`."""
        return self._chooser.names

    @property
    def variant(self) -> str:
        """Which of its graphs runs."""
        return "weights" if self._chooser.runs else "text"

    @property
    def depth(self) -> int:
        """Guesses that the next cycle verifies."""
        return self._chooser.depth

    @property
    def leads(self) -> bool:
        """Whether what the host knows without drafters is worth its place in the next cycle."""
        return self._chooser.leads

    def take_back(self) -> None:
        """The cycle that `ready` was called for does not come."""
        self._chooser.take_back()

    def ready(self, seqs: Seqs[Sequence]) -> None:
        self._chooser.choose(seqs)
        self._tell()
        for part in (self._text, self._weighted):
            if part is not None:
                part.ready(seqs)

    def propose(self, batch: CapturedBatch, k: int) -> Tensor:
        self.by = None
        if k == 0:
            return batch.draft
        text = self._text.propose(batch, k)
        self.by = self._taken(batch)
        take = self.by[:, None]
        draft = torch.where((take & TEXT) != 0, text, NO_GUESS)
        if self._weighted is None or not self._chooser.runs:
            return draft
        batch.draft.fill_(NO_GUESS)
        own = self._weighted.propose(batch, k)
        theirs = ((take & WEIGHTS) != 0) & (draft[:, :1] == NO_GUESS)
        self.by = torch.where(theirs[:, 0], WEIGHTS, TEXT).int()
        return torch.where(theirs, own, draft)

    def observe(self, batch: CapturedBatch, step: Step, accepted: Tensor) -> None:
        if self._weighted is not None:
            self._weighted.observe(batch, step, accepted)

    def _taken(self, batch: CapturedBatch) -> Tensor:
        """Of each row, on the device: graphs read it where it is."""
        if self._take is None:
            self._told = self._chooser.take.copy()
            self._take = torch.from_numpy(self._told).to(batch.rows.slot.device, copy=True)
        return self._take.index_select(0, batch.rows.slot.clamp(min=0))

    def _tell(self) -> None:
        """Out of page-locked memory: else the host would wait for the cycle that runs."""
        if self._take is None or np.array_equal(self._told, self._chooser.take):
            return
        self._told = self._chooser.take.copy()
        with torch.inference_mode():
            self._take.copy_(page_locked(self._told), non_blocking=True)
