"""What a cycle costs: seconds by rows, tokens verified, and guesses of a drafter with weights."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import NamedTuple, Protocol

REMEMBERED = 15
"""Cycles of a kind whose median counts."""
COMPILED = 1
"""First cycles of a kind that do not count: programs are compiled for them."""
STRANGE, BELIEVED = 5.0, 3
"""So many times what was expected is a pause, such as for a program that some request is the first
to need; after so many of them in a row it is believed."""


class Work(NamedTuple):
    """What a cycle does."""

    rows: int
    depth: int
    """Draft tokens that are verified, per row."""
    drafted: int
    """Guesses that the drafter with weights makes, per row; 0: it does not run."""


class Costs(Protocol):
    """What a choice asks of a cost table."""

    def seconds(self, work: Work) -> float: ...

    def saw(self, work: Work, seconds: float) -> None:
        """A cycle of this kind took so long."""
        ...

    def rows(self) -> list[tuple[Work, float]]:
        """What is known."""
        ...


class CostTable:
    """Measured: at the start, and in each cycle from then on."""

    def __init__(self) -> None:
        self._seen: dict[Work, deque[float]] = {}
        self._met: dict[Work, int] = {}
        self._strange: dict[Work, int] = {}

    def saw(self, work: Work, seconds: float) -> None:
        place = _rounded(work)
        self._met[place] = self._met.get(place, 0) + 1
        if self._met[place] <= COMPILED or self._is_pause(place, seconds):
            return
        self._seen.setdefault(place, deque(maxlen=REMEMBERED)).append(seconds)

    def _is_pause(self, place: Work, seconds: float) -> bool:
        strange = bool(self._seen) and seconds > STRANGE * self.seconds(place)
        self._strange[place] = self._strange.get(place, 0) + 1 if strange else 0
        return strange and self._strange[place] < BELIEVED

    def seconds(self, work: Work) -> float:
        """The median of such cycles; of what was never seen that of the most alike. 1 where nothing
        was: then the most tokens win."""
        place = _rounded(work)
        if place not in self._seen and self._seen:
            place = min(self._seen, key=lambda seen: _distance(seen, place))
        return median(self._seen[place]) if place in self._seen else 1.0

    def rows(self) -> list[tuple[Work, float]]:
        """All that was measured, in order."""
        return sorted((work, median(seen)) for work, seen in list(self._seen.items()))


def _rounded(work: Work) -> Work:
    """Rows by powers of two: batches of about one size cost about the same."""
    return work._replace(rows=1 << (work.rows - 1).bit_length())


def _distance(seen: Work, wanted: Work) -> tuple[int, int, int]:
    """Whether the drafter with weights runs tells more than how deep, and that more than rows."""
    runs = int(bool(seen.drafted) != bool(wanted.drafted))
    deep = abs(seen.drafted - wanted.drafted) + abs(seen.depth - wanted.depth)
    return runs, deep, abs(seen.rows.bit_length() - wanted.rows.bit_length())
