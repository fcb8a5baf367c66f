"""How far a drafter's guesses hold: the chance that the first j are all right, from what was seen.

A guess is at risk where all before it were right. The chance that one at risk is right is counted,
and the chances multiply (Kaplan & Meier 1958): so a draft that was cut short, or of which only the
beginning could be compared, counts as far as it was seen, and nothing beyond is forgotten for it. A
bucket that saw little believes what all buckets together saw, and a position what the one before it
did.
"""

from __future__ import annotations

DISCOUNT = 0.98
"""Of what was seen, with each further cycle: the last fifty count, so that a text may change."""
BELIEF = 5.0
"""Drafts that the guess before a position stands for, where few were seen."""
FIRST = 0.6
"""Chance of a first guess of which nothing is known: high enough for it to be tried."""
BUCKETS = 8


def bucket_of(length: int) -> int:
    """0 to 7, for 0, 1, 2 - 3, 4 - 7, ... 64 and more: of a match's length, or of any count."""
    return min(length.bit_length(), BUCKETS - 1)


class Survival:
    """Of one drafter. Drafts differ by how much speaks for them: each bucket has its own counts."""

    def __init__(self, k: int) -> None:
        """k: most guesses of a draft."""
        self.k = k
        self._at_risk = [[0.0] * k for _ in range(BUCKETS + 1)]
        self._right = [[0.0] * k for _ in range(BUCKETS + 1)]
        """By bucket and position; the last one holds all buckets."""
        self._expected: list[list[float] | None] = [None] * BUCKETS

    def learn(self, bucket: int, right: int, guessed: int, known: int, rows: int = 1) -> None:
        """One draft of `guessed` guesses, the first `right` of which are right, as far as the first
        `known` tokens of the text that came tell. rows: those of its cycle, each with a draft."""
        discount = DISCOUNT ** (1 / rows)
        compared = min(guessed, known, self.k)
        kept = min(right, compared)
        for place in (bucket, BUCKETS):
            at_risk, hits = self._at_risk[place], self._right[place]
            for j in range(compared):
                at_risk[j] = at_risk[j] * discount + (j <= kept)
                hits[j] = hits[j] * discount + (j < kept)
        self._expected = [None] * BUCKETS

    def expected(self, bucket: int) -> list[float]:
        """Mean number of guesses that are right, of drafts of 0, 1, ... k."""
        found = self._expected[bucket]
        if found is None:
            found = self._expected[bucket] = self._sum(bucket)
        return found

    def survival(self, bucket: int) -> list[float]:
        """Chance that at least 1, 2, ... k guesses are right."""
        sums = self.expected(bucket)
        return [after - before for before, after in zip(sums, sums[1:], strict=False)]

    def overall(self) -> list[float]:
        """`expected` of all buckets together."""
        chance, alive, total, sums = FIRST, 1.0, 0.0, [0.0]
        for j in range(self.k):
            chance = self._chance(BUCKETS, j, chance)
            alive *= chance
            total += alive
            sums.append(total)
        return sums

    @property
    def buckets(self) -> list[int]:
        """Those of which drafts count at present."""
        return [b for b in range(BUCKETS) if self.k and self._at_risk[b][0] > 0.5]

    def _sum(self, bucket: int) -> list[float]:
        common, alive, total, sums = FIRST, 1.0, 0.0, [0.0]
        for j in range(self.k):
            common = self._chance(BUCKETS, j, common)
            alive *= self._chance(bucket, j, common)
            total += alive
            sums.append(total)
        return sums

    def _chance(self, place: int, j: int, believed: float) -> float:
        return (self._right[place][j] + BELIEF * believed) / (self._at_risk[place][j] + BELIEF)
