"""What cycles promised, beside what came of them.

The most promising of several estimates is the one that errs upwards: chosen for its promise, it
keeps less (the optimizer's curse, Smith & Winkler 2006). What a kind of cycle kept so far is what
its next promise is worth.
"""

from __future__ import annotations

KEPT = 0.97
"""Of promises so far, with each further cycle: the last thirty count."""
BELIEF = 50.0
"""Guesses whose promise was kept, before anything came."""
FEW = 6.0
"""Cycles of a kind from which what came is believed; those that lack count as if they had kept
theirs: rows that are alike break a cycle's promise together, and tell no more than one of them."""


class Promises:
    """Guesses that were to be right and that were, by kind of cycle: (depth, drafted)."""

    def __init__(self) -> None:
        self._promised: dict[tuple[int, int], float] = {}
        self._came: dict[tuple[int, int], float] = {}
        self._cycles: dict[tuple[int, int], float] = {}

    def learn(self, kind: tuple[int, int], promised: float, came: float) -> None:
        """Of all rows of one cycle."""
        for sums in (self._promised, self._came, self._cycles):
            for other in sums:
                sums[other] *= KEPT
        self._promised[kind] = self._promised.get(kind, 0.0) + promised
        self._came[kind] = self._came.get(kind, 0.0) + came
        self._cycles[kind] = self._cycles.get(kind, 0.0) + 1

    def kept(self, kind: tuple[int, int]) -> float:
        """The part of a promise that is kept, at most 1."""
        promised, came = self._promised.get(kind, 0.0), self._came.get(kind, 0.0)
        cycles = self._cycles.get(kind, 1.0)
        belief = max(BELIEF, (FEW - cycles) * promised / cycles)
        return min(1.0, (came + belief) / (promised + belief))
