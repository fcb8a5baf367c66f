"""Several drafters as one in the captured cycle: prompt lookup, and one with weights. The host
writes each row's drafter into a tensor before a cycle (`late.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seqs
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from drafters.auto.late import TEXT, WEIGHTS, LateChooser
from specdec.core.types import NO_GUESS, CycleChoice, Proposal, Sequence, Step
from targets.cuda.cards import OnCards
from targets.cuda.device_drafter import CapturedBatch, DeviceDrafter
from targets.cuda.upload import page_locked


class Chooser(Protocol):
    """The part of `LateChooser` that a `DeviceAuto` uses."""

    @property
    def take(self) -> np.ndarray: ...
    @property
    def runs(self) -> bool: ...
    @property
    def names(self) -> tuple[str, ...]: ...
    def choose(self, seqs: Seqs[Sequence], /) -> CycleChoice: ...
    def take_back(self) -> None: ...


class RepeatedChoice:
    """The `Chooser` of a card behind the first one, which has chosen by then."""

    def __init__(self, first: LateChooser) -> None:
        self._first = first

    @property
    def take(self) -> np.ndarray:
        return self._first.take

    @property
    def runs(self) -> bool:
        return self._first.runs

    @property
    def names(self) -> tuple[str, ...]:
        return self._first.names

    def choose(self, seqs: Seqs[Sequence], /) -> CycleChoice:
        return self._first.choice

    def take_back(self) -> None:
        pass


def on_device(
    chooser: LateChooser, text: DeviceDrafter | OnCards, weighted: DeviceDrafter | OnCards | None
) -> DeviceAuto | OnCards:
    """The device loop's drafter, or one of each card."""
    if not isinstance(text, OnCards):
        assert not isinstance(weighted, OnCards)
        return DeviceAuto(chooser, text, weighted)
    count = len(text.each)
    choosers = [chooser, *[RepeatedChoice(chooser)] * (count - 1)]
    own = weighted.each if isinstance(weighted, OnCards) else [None] * count
    return OnCards([DeviceAuto(*parts) for parts in zip(choosers, text.each, own, strict=True)])


class DeviceAuto:
    """A `DeviceDrafter` with three graphs: the drafter with weights guesses, or only the text
    drafter, or none. In each, the drafter with weights observes every cycle."""

    def __init__(
        self, chooser: Chooser, text: DeviceDrafter, weighted: DeviceDrafter | None
    ) -> None:
        self._chooser, self._text, self._weighted = chooser, text, weighted
        self._take: Tensor | None = None
        self._copied = np.empty(0, np.int32)
        """The values in `_take`."""

    def with_weighted(self, wrap: Callable[[DeviceDrafter], DeviceDrafter]) -> DeviceAuto:
        """The same, the drafter with weights wrapped."""
        weighted = None if self._weighted is None else wrap(self._weighted)
        return DeviceAuto(self._chooser, self._text, weighted)

    def ready(self, seqs: Seqs[Sequence]) -> CycleChoice:
        choice = self._chooser.choose(seqs)
        self._write_taken()
        for part in (self._text, self._weighted):
            if part is not None:
                part.ready(seqs)
        return choice

    def take_back(self) -> None:
        self._chooser.take_back()

    def propose(self, batch: CapturedBatch, k: int) -> Proposal:
        if k == 0:
            return Proposal(batch.draft)
        text, names = self._text.propose(batch, k).tokens, self._chooser.names
        source = self._taken(batch)
        take = source[:, None]
        draft = torch.where((take & TEXT) != 0, text, NO_GUESS)
        if self._weighted is None or not self._chooser.runs:
            return Proposal(draft, source, names)
        batch.draft.fill_(NO_GUESS)
        own = self._weighted.propose(batch, k).tokens
        by_weights = ((take & WEIGHTS) != 0) & (draft[:, :1] == NO_GUESS)
        source = torch.where(by_weights[:, 0], WEIGHTS, TEXT).int()
        return Proposal(torch.where(by_weights, own, draft), source, names)

    def observe(self, batch: CapturedBatch, step: Step, accepted: Tensor) -> None:
        if self._weighted is not None:
            self._weighted.observe(batch, step, accepted)

    def _taken(self, batch: CapturedBatch) -> Tensor:
        """[B] int32, by row: graphs read it where it is."""
        if self._take is None:
            self._copied = self._chooser.take.copy()
            self._take = torch.from_numpy(self._copied).to(batch.rows.slot.device, copy=True)
        return self._take.index_select(0, batch.rows.slot.clamp(min=0))

    def _write_taken(self) -> None:
        """Out of page-locked memory: else the host would wait for the cycle that runs."""
        if self._take is None or np.array_equal(self._copied, self._chooser.take):
            return
        self._copied = self._chooser.take.copy()
        with torch.inference_mode():
            self._take.copy_(page_locked(self._copied), non_blocking=True)
