"""An engine's time by part, and the time that plain decoding would have taken for the same
tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from dataclasses import dataclass, field
from time import perf_counter
from typing import Generic

from specdec.core.protocols import Batch, Proposer, Verifier
from specdec.core.types import Array, Proposal, Round, Step

PARTS = ("prefill", "draft", "verify", "learn", "device", "host")
"""prefill: reading prompts. draft, verify, learn: a cycle of the host loop; choosing tokens is part
of verify. device: whole cycles of a device loop, which the host can't split. host: everything else
in the engine's thread."""


class Timed(Generic[Batch]):
    """A target and a drafter in one object that measures the time of each call."""

    def __init__(self, target: Verifier[Batch], drafter: Proposer[Batch]) -> None:
        self._target, self._drafter = target, drafter
        self.seconds: dict[str, float] = {}

    def propose(self, batch: Batch, k: int, /) -> Proposal:
        began = perf_counter()
        proposal = self._drafter.propose(batch, k)
        self.seconds["draft"] = perf_counter() - began
        return proposal

    def verify(self, batch: Batch, draft: Array, /) -> Step:
        began = perf_counter()
        step = self._target.verify(batch, draft)
        self.seconds["verify"] = perf_counter() - began
        return step

    def observe(self, batch: Batch, step: Step, accepted: Array, /) -> None:
        began = perf_counter()
        self._drafter.observe(batch, step, accepted)
        self.seconds["learn"] = perf_counter() - began


@dataclass(frozen=True)
class PlainCosts:
    """Seconds of one step of plain decoding, measured for one row and for all slots."""

    one: float
    all: float
    slots: int

    def of(self, rows: int) -> float:
        """Seconds of a step of `rows` rows, interpolated linearly."""
        share = (rows - 1) / (self.slots - 1) if self.slots > 1 else 0.0
        return self.one + share * (self.all - self.one)


@dataclass
class EngineTimes:
    """Written by the engine's thread, read by any thread."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """By part (`PARTS`)."""
    plain: float = 0.0
    """Seconds that plain decoding would have taken for the tokens that cycles emitted."""
    plain_costs: PlainCosts | None = None
    """None: not measured."""
    _known: float = 0.0

    @property
    def known(self) -> float:
        """Seconds of all parts so far."""
        return self._known

    @property
    def decoding(self) -> float:
        """The same without reading prompts."""
        return self._known - self.seconds["prefill"]

    def add(self, part: str, seconds: float) -> None:
        self.seconds[part] += seconds
        self._known += seconds

    def dispatched(self, rounds: Seqs[Round], took: float) -> float:
        """Note one dispatch of cycles. Returns the seconds of each, their mean."""
        rest, part = took, "device"
        for done in rounds:
            for name, seconds in (done.seconds or {}).items():
                self.add(name, seconds)
                rest, part = rest - seconds, "host"
        self.add(part, rest)
        return took / max(1, len(rounds))

    def stepped(self, took: float, before: float) -> None:
        """Note a whole step of the engine; before: `known` when it began."""
        self.add("host", took - (self._known - before))

    def emitted(self, tokens: int, rows: int) -> None:
        """Note the tokens that a cycle emitted for so many rows together."""
        if self.plain_costs is not None and rows:
            self.plain += self.plain_costs.of(rows) * tokens / rows
