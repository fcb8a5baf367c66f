"""Corrects expected numbers of right guesses by what earlier cycles achieved.

The highest of several estimates tends to be too high, so the chosen cycle achieves less than was
expected (the optimizer's curse, Smith & Winkler 2006). Expectations are therefore multiplied by the
share that cycles of the same kind have achieved so far.
"""

from __future__ import annotations

KEPT = 0.97
"""Discount of earlier cycles per further cycle: about the last thirty count."""
BELIEF = 50.0
"""Prior: expected guesses that count as achieved before the first cycle."""
FEW = 6.0
"""Fewest cycles of a kind for a full correction. Missing ones count as if they had achieved what
was expected: similar rows of one cycle fail together, so many rows are no more evidence than
one."""


class Promises:
    """Expected and actual right guesses, by kind of cycle: (depth, drafted)."""

    def __init__(self) -> None:
        self._promised: dict[tuple[int, int], float] = {}
        self._came: dict[tuple[int, int], float] = {}
        self._cycles: dict[tuple[int, int], float] = {}

    def learn(self, kind: tuple[int, int], promised: float, came: float) -> None:
        """Record one cycle's expected and actual right guesses, summed over its rows."""
        for sums in (self._promised, self._came, self._cycles):
            for other in sums:
                sums[other] *= KEPT
        self._promised[kind] = self._promised.get(kind, 0.0) + promised
        self._came[kind] = self._came.get(kind, 0.0) + came
        self._cycles[kind] = self._cycles.get(kind, 0.0) + 1

    def kept(self, kind: tuple[int, int]) -> float:
        """The achieved share of the expected guesses, at most 1."""
        promised, came = self._promised.get(kind, 0.0), self._came.get(kind, 0.0)
        cycles = self._cycles.get(kind, 1.0)
        belief = max(BELIEF, (FEW - cycles) * promised / cycles)
        return min(1.0, (came + belief) / (promised + belief))
