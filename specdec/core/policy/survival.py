"""Estimates the chance that a drafter's first j guesses are all right, from earlier drafts.

A guess is at risk if all guesses before it were right. The table counts how often a guess at risk
is right at each position, and multiplies these chances (Kaplan & Meier 1958). So a draft that was
cut short, or of which only the beginning could be compared, counts up to there, and the counts of
later positions are not discounted for it. A bucket with few drafts uses the chances of all buckets
together as its prior, and a position with few drafts the chance of the position before.
"""

from __future__ import annotations

DISCOUNT = 0.98
"""Discount of earlier drafts per further cycle: about the last fifty count, as the text may
change."""
BELIEF = 5.0
"""Weight of a prior, in drafts."""
FIRST = 0.6
"""Prior for a first guess without any data: high enough for it to be tried."""
BUCKETS = 8


def bucket_of(length: int) -> int:
    """The bucket 0 to 7 of a match's length, or of any count: 0, 1, 2 - 3, 4 - 7, ... 64 and
    more."""
    return min(length.bit_length(), BUCKETS - 1)


class Survival:
    """One drafter's table. Drafts are sorted into buckets by the strength of their evidence; each
    bucket has its own counts."""

    def __init__(self, k: int) -> None:
        """k: most guesses of a draft."""
        self.k = k
        self._at_risk = [[0.0] * k for _ in range(BUCKETS + 1)]
        self._right = [[0.0] * k for _ in range(BUCKETS + 1)]
        """Counts by bucket and position; the last entry counts all buckets together."""
        self._expected: list[list[float] | None] = [None] * BUCKETS

    def learn(self, bucket: int, right: int, guessed: int, known: int, rows: int = 1) -> None:
        """Count a draft of `guessed` guesses of which the first `right` are right; only the first
        `known` could be compared with the text. rows: rows of its cycle, each with a draft."""
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
        """Mean number of right guesses, for drafts of 0, 1, ... k tokens."""
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
        """The buckets with recent drafts."""
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
