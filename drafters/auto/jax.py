"""Several drafters as one in the traced loop: prompt lookup, and one with weights. Whose guesses
each row takes is an array that the host writes before a dispatch (`late.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seqs
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from drafters.auto.late import TEXT, WEIGHTS, LateChooser
from specdec.core.types import NO_GUESS, Array, Sequence, Step
from targets.jax.device_drafter import DeviceDrafter, SlotState, TracedDrafter, TracedProgram


class DeviceAuto:
    """A `DeviceDrafter`. One program where the drafter with weights guesses, one where it does
    not; it learns from every cycle in both."""

    def __init__(
        self, chooser: LateChooser, text: DeviceDrafter, weighted: DeviceDrafter | None
    ) -> None:
        self._chooser, self._text, self._weighted = chooser, text, weighted

    def with_weighted(self, wrap: Callable[[DeviceDrafter], DeviceDrafter]) -> DeviceAuto:
        """The same, the drafter with weights wrapped."""
        weighted = None if self._weighted is None else wrap(self._weighted)
        return DeviceAuto(self._chooser, self._text, weighted)

    @property
    def memory(self) -> Any:
        return () if self._weighted is None else self._weighted.memory

    @memory.setter
    def memory(self, memory: Any) -> None:
        if self._weighted is not None:
            self._weighted.memory = memory

    @property
    def lasts(self) -> bool:
        """Whether a dispatch may have several cycles."""
        return self._chooser.lasts

    @property
    def leads(self) -> bool:
        """Whether what the host knows without drafters is worth its place in the next cycle."""
        return self._chooser.leads

    @property
    def names(self) -> dict[int, str]:
        """The drafters by their numbers in `by`."""
        return self._chooser.names

    def ready(self, seqs: Seqs[Sequence]) -> None:
        self._chooser.choose(seqs)
        for part in (self._text, self._weighted):
            if part is not None:
                part.ready(seqs)

    def program(self, needs_sampler: bool) -> TracedProgram:
        weighted = None if self._weighted is None else self._weighted.program(needs_sampler)
        return _Program(self._text.program(needs_sampler), weighted, self._chooser.runs)

    def weights(self) -> Any:
        weighted = () if self._weighted is None else self._weighted.weights()
        return self._chooser.take.copy(), self._text.weights(), weighted


@dataclass(frozen=True)
class _Program:
    text: TracedProgram
    weighted: TracedProgram | None
    runs: bool

    def on(self, weights: Any, memory: Any) -> TracedDrafter:
        take, texts, own = weights
        weighted = None if self.weighted is None else self.weighted.on(own, memory)
        return _Traced(take, self.text.on(texts, ()), weighted, self.runs)


class _Traced:
    def __init__(
        self, take: Array, text: TracedDrafter, weighted: TracedDrafter | None, runs: bool
    ) -> None:
        self._take, self._text, self._weighted, self._runs = take[:, None], text, weighted, runs
        self.by = jnp.full_like(take, TEXT)
        """[B]: whose the last guesses of a row are."""

    @property
    def memory(self) -> Any:
        return () if self._weighted is None else self._weighted.memory

    def propose(self, batch: SlotState, k: int) -> Array:
        take, text = self._take, self._text.propose(batch, k)
        draft = jnp.where((take & TEXT) != 0, text, NO_GUESS)
        if not self._runs or self._weighted is None:
            return draft
        own = self._weighted.propose(batch, k)
        theirs = ((take & WEIGHTS) != 0) & (draft[:, :1] == NO_GUESS)
        self.by = jnp.where(theirs[:, 0], WEIGHTS, TEXT)
        return jnp.where(theirs, own, draft)

    def observe(self, batch: SlotState, step: Step, accepted: Array) -> None:
        if self._weighted is not None:
            self._weighted.observe(batch, step, accepted)
