"""Several drafters as one in the traced loop: prompt lookup, and one with weights. The host
writes each row's drafter into an array before a dispatch (`late.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seqs
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from drafters.auto.late import TEXT, WEIGHTS, LateChooser
from specdec.core.types import NO_GUESS, Array, CycleChoice, Proposal, Sequence, Step
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

    def ready(self, seqs: Seqs[Sequence]) -> CycleChoice:
        choice = self._chooser.choose(seqs)
        for part in (self._text, self._weighted):
            if part is not None:
                part.ready(seqs)
        return choice

    def program(self, needs_sampler: bool) -> TracedProgram:
        chooser, text = self._chooser, self._text.program(needs_sampler)
        weighted = None if self._weighted is None else self._weighted.program(needs_sampler)
        return _Program(text, weighted, chooser.runs, chooser.names)

    def weights(self) -> Any:
        weighted = () if self._weighted is None else self._weighted.weights()
        return self._chooser.take.copy(), self._text.weights(), weighted


@dataclass(frozen=True)
class _Program:
    text: TracedProgram
    weighted: TracedProgram | None
    runs: bool
    """Whether the drafter with weights guesses."""
    names: tuple[str, ...]

    def on(self, weights: Any, memory: Any) -> TracedDrafter:
        take, texts, own = weights
        weighted = None if self.weighted is None else self.weighted.on(own, memory)
        return _Traced(self, take, self.text.on(texts, ()), weighted)


class _Traced:
    def __init__(
        self, static: _Program, take: Array, text: TracedDrafter, weighted: TracedDrafter | None
    ) -> None:
        self._static, self._take, self._text, self._weighted = static, take, text, weighted

    @property
    def memory(self) -> Any:
        return () if self._weighted is None else self._weighted.memory

    def propose(self, batch: SlotState, k: int) -> Proposal:
        take, names = self._take[:, None], self._static.names
        text = self._text.propose(batch, k).tokens
        draft = jnp.where((take & TEXT) != 0, text, NO_GUESS)
        if not self._static.runs or self._weighted is None:
            return Proposal(draft, jnp.full_like(self._take, TEXT), names)
        own = self._weighted.propose(batch, k).tokens
        by_weights = ((take & WEIGHTS) != 0) & (draft[:, :1] == NO_GUESS)
        source = jnp.where(by_weights[:, 0], WEIGHTS, TEXT)
        return Proposal(jnp.where(by_weights, own, draft), source, names)

    def observe(self, batch: SlotState, step: Step, accepted: Array) -> None:
        if self._weighted is not None:
            self._weighted.observe(batch, step, accepted)
