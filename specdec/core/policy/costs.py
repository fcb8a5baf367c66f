"""Costs of cycles: seconds by rows, verified tokens, guesses of a drafter with weights, and the
length of the texts."""

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
SHORT_CONTEXT = 4096
"""Tokens of all rows' texts below which their keys and values cost little beside the weights."""


class Work(NamedTuple):
    """A kind of cycle."""

    rows: int
    depth: int
    """Draft tokens that are verified, per row."""
    drafted: int
    """Guesses that the drafter with weights makes, per row; 0: it does not run."""
    context: int = 0
    """Tokens of all rows' texts."""


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
    """Measured costs: at the start, with short texts, and in each cycle from then on."""

    def __init__(self) -> None:
        self._seen: dict[int, dict[Work, deque[float]]] = {}
        """By context, then by the rest of the work."""
        self._met: dict[Work, int] = {}
        self._strange: dict[Work, int] = {}

    def saw(self, work: Work, seconds: float) -> None:
        context, kind = _rounded(work)
        self._met[kind] = self._met.get(kind, 0) + 1
        if self._met[kind] <= COMPILED or self._is_pause(work, kind, seconds):
            return
        there = self._seen.setdefault(context, {})
        there.setdefault(kind, deque(maxlen=REMEMBERED)).append(seconds)

    def _is_pause(self, work: Work, kind: Work, seconds: float) -> bool:
        strange = bool(self._seen) and seconds > OUTLIER_FACTOR * self.seconds(work)
        self._strange[kind] = self._strange.get(kind, 0) + 1 if strange else 0
        return strange and self._strange[kind] < OUTLIERS_COUNT_FROM

    def seconds(self, work: Work) -> float:
        """The median time of such cycles; for a kind without measurements, that of the most similar
        kind; 1 without any measurement, so that the most tokens win. A kind that was not measured
        with texts as long costs as much more there as the most similar one does: compared with
        what it took with short texts, any other kind would look dear."""
        if not self._seen:
            return 1.0
        context, kind = _rounded(work)
        # a copy, here and below: the server's metrics read it beside the engine's thread
        context = min(list(self._seen), key=lambda seen: _apart(seen, context))
        there, near = self._seen[context], self._seen.get(0)
        alike = _most_alike(there, kind)
        took = median(there[alike])
        if alike == kind or context == 0 or near is None:
            return took
        own, its = (median(near[_most_alike(near, one)]) for one in (kind, alike))
        return own + max(0.0, took - its)

    def rows(self) -> list[tuple[Work, float]]:
        """All measured kinds with their medians, sorted."""
        return sorted(
            (kind._replace(context=context), median(seen))
            for context, there in list(self._seen.items())
            for kind, seen in list(there.items())
        )


def _rounded(work: Work) -> tuple[int, Work]:
    """Its context rounded down to a power of two, a short one to 0, and the rest with its rows
    rounded up to one: similar batches cost about the same."""
    context = 0 if work.context < SHORT_CONTEXT else 1 << (work.context.bit_length() - 1)
    return context, Work(1 << (work.rows - 1).bit_length(), work.depth, work.drafted)


def _apart(one: int, other: int) -> int:
    """Dissimilarity of two rounded contexts."""
    return abs(one.bit_length() - other.bit_length())


def _most_alike(seen: dict[Work, deque[float]], place: Work) -> Work:
    return place if place in seen else min(list(seen), key=lambda kind: _distance(kind, place))


def _distance(seen: Work, wanted: Work) -> tuple[int, int, int]:
    """Dissimilarity of two kinds: first whether the drafter with weights runs, then depths, then
    rows."""
    runs = int(bool(seen.drafted) != bool(wanted.drafted))
    deep = abs(seen.drafted - wanted.drafted) + abs(seen.depth - wanted.depth)
    return runs, deep, abs(seen.rows.bit_length() - wanted.rows.bit_length())
