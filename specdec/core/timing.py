"""Where an engine's time goes, and what plain decoding would have taken for the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seqs
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Generic, TypeVar

from specdec.core.protocols import Batch, Proposer, Verifier
from specdec.core.types import Array, Round, Step

T = TypeVar("T")

PARTS = ("prefill", "draft", "verify", "learn", "device", "host")
"""prefill: reading prompts. draft, verify, learn: a cycle that the host drives; what is chosen is
part of verify. device: whole cycles of a device loop, whose parts the host can't see. host: all
else that the engine's thread does."""


class Timed(Generic[Batch]):
    """A target and a drafter in one, that note how long each call took."""

    def __init__(self, target: Verifier[Batch], drafter: Proposer[Batch]) -> None:
        self._target, self._drafter = target, drafter
        self.seconds: dict[str, float] = {}

    def propose(self, batch: Batch, k: int, /) -> Array:
        return self._timed("draft", lambda: self._drafter.propose(batch, k))

    def verify(self, batch: Batch, draft: Array, /) -> Step:
        return self._timed("verify", lambda: self._target.verify(batch, draft))

    def observe(self, batch: Batch, step: Step, accepted: Array, /) -> None:
        self._timed("learn", lambda: self._drafter.observe(batch, step, accepted))

    def _timed(self, part: str, work: Callable[[], T]) -> T:
        began = perf_counter()
        done = work()
        self.seconds[part] = perf_counter() - began
        return done


@dataclass(frozen=True)
class PlainCosts:
    """Seconds of one step of plain decoding, measured for one row and for all slots."""

    one: float
    all: float
    slots: int

    def of(self, rows: int) -> float:
        """Of so many rows, between the two."""
        share = (rows - 1) / (self.slots - 1) if self.slots > 1 else 0.0
        return self.one + share * (self.all - self.one)


@dataclass
class EngineTimes:
    """Written by the engine's thread, read by anybody."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """By part (`PARTS`)."""
    plain: float = 0.0
    """Seconds that plain decoding would have taken for the tokens that cycles emitted."""
    plain_costs: PlainCosts | None = None
    """None: nobody measured."""

    @contextmanager
    def prefilling(self) -> Iterator[None]:
        began = perf_counter()
        yield
        self.seconds["prefill"] += perf_counter() - began

    def dispatched(self, rounds: Seqs[Round], took: float) -> float:
        """Note one dispatch of cycles. Returns the seconds of each, their mean."""
        parts = [done.seconds for done in rounds if done.seconds is not None]
        for part, seconds in (item for each in parts for item in each.items()):
            self.seconds[part] += seconds
        known = sum(sum(each.values()) for each in parts)
        self.seconds["host" if parts else "device"] += took - known
        return took / max(1, len(rounds))

    def stepped(self, took: float, before: float) -> None:
        """Note a whole step of the engine; before: `known` when it began."""
        self.seconds["host"] += took - (self.known - before)

    @property
    def known(self) -> float:
        """Seconds of all parts so far."""
        return sum(self.seconds.values())

    def emitted(self, tokens: int, rows: int) -> None:
        """Note the tokens that a cycle emitted for so many rows together."""
        if self.plain_costs is not None and rows:
            self.plain += self.plain_costs.of(rows) * tokens / rows
