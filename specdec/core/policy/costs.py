"""Costs of cycles: seconds by rows, verified tokens, and guesses of a drafter with weights."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import NamedTuple, Protocol

REMEMBERED = 15
"""The cost of a kind of cycle is the median of this many last ones."""
COMPILED = 1
"""First cycles of a kind that are ignored, as programs are compiled for them."""
OUTLIER_FACTOR = 5.0
"""A cycle that takes more than this many times its expected time is ignored as a pause, such as the
compilation of a program for some request."""
OUTLIERS_COUNT_FROM = 3
"""From this many such cycles in a row on, they count."""


class Work(NamedTuple):
    """A kind of cycle."""

    rows: int
    depth: int
    """Draft tokens that are verified, per row."""
    drafted: int
    """Guesses that the drafter with weights makes, per row; 0: it does not run."""


class Costs(Protocol):
    """The interface of a cost table."""

    def seconds(self, work: Work) -> float: ...

    def saw(self, work: Work, seconds: float) -> None:
        """Record the time of a cycle of this kind."""
        ...

    def rows(self) -> list[tuple[Work, float]]:
        """All kinds of cycles with their seconds."""
        ...


class CostTable:
    """Measured costs: at the start, and in each cycle from then on."""

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
        strange = bool(self._seen) and seconds > OUTLIER_FACTOR * self.seconds(place)
        self._strange[place] = self._strange.get(place, 0) + 1 if strange else 0
        return strange and self._strange[place] < OUTLIERS_COUNT_FROM

    def seconds(self, work: Work) -> float:
        """The median time of such cycles; for a kind without measurements, that of the most similar
        kind; 1 without any measurement, so that the most tokens win."""
        place = _rounded(work)
        if place not in self._seen and self._seen:
            place = min(self._seen, key=lambda seen: _distance(seen, place))
        return median(self._seen[place]) if place in self._seen else 1.0

    def rows(self) -> list[tuple[Work, float]]:
        """All measured kinds with their medians, sorted."""
        return sorted((work, median(seen)) for work, seen in list(self._seen.items()))


def _rounded(work: Work) -> Work:
    """The work with its rows rounded up to a power of two: similar batches cost about the same."""
    return work._replace(rows=1 << (work.rows - 1).bit_length())


def _distance(seen: Work, wanted: Work) -> tuple[int, int, int]:
    """Dissimilarity of two kinds: first whether the drafter with weights runs, then depths, then
    rows."""
    runs = int(bool(seen.drafted) != bool(wanted.drafted))
    deep = abs(seen.drafted - wanted.drafted) + abs(seen.depth - wanted.depth)
    return runs, deep, abs(seen.rows.bit_length() - wanted.rows.bit_length())
