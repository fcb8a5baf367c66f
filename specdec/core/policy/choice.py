"""The policy: which drafter guesses for each row, and how many tokens a cycle verifies.

The long-run rate tokens / time is highest if each cycle maximises E[tokens] - rate * time
(Dinkelbach 1967). The rate is known as a speed-up over plain decoding of as many rows, for batches
grow and shrink faster than a rate is learned. Tokens come from survival tables, time from a cost
table. Off is a draft of no tokens. What is chosen decides how fast the text comes, and no token of
it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence as Seqs
from dataclasses import dataclass, field

from specdec.core.policy.costs import Costs, Work
from specdec.core.policy.promises import Promises
from specdec.core.policy.survival import DISCOUNT, Survival

SHADOW = 32
"""Cycles after which a drafter with weights that does not pay is tried again: the text may have
changed."""
TRIALS, DEEPER = 0.01, 0.03
"""Part of the time that trials may take: of a drafter that does not pay, and of longer drafts,
which bring more tokens for it."""
APART = 4
"""Cycles between trials of longer drafts, at least."""
ALLOWANCE = 0.7
"""Cycles that trials of longer drafts may take beyond that part, for they can't be judged unseen: a
few at the start."""
FADE = 0.97
"""Of tokens and time so far, with each cycle: the speed-up is the last thirty cycles'."""
BESIDE_WEIGHTS = 0.7
"""What a right guess of lookup counts where a drafter with weights could guess instead. Means don't
tell that both stumble over the same hard token: a lookup that ends before it has cost a cycle, for
the next one gets no further than the weights would have got at once."""
LONG = 6
"""Bucket of lookup (`survival.bucket_of`) from which its guesses count in full all the same: so
long a match is a copy."""


@dataclass(frozen=True)
class Offer:
    """What one drafter has to say on one row."""

    drafter: str
    bucket: int
    """How much speaks for it, see `survival.bucket_of`."""
    guesses: int
    """How many there are; of a drafter with weights, how many it could make."""


@dataclass(frozen=True)
class RowOffers:
    """What a cycle's row can choose from."""

    offers: tuple[Offer, ...]
    most: int
    """Guesses at most: the request's own limit."""
    insists: bool = False
    """Whether the request asked for the drafter with weights by name."""


@dataclass(frozen=True)
class Choice:
    """What a cycle does."""

    depth: int
    """Draft tokens that are verified, per row."""
    drafted: int
    """Guesses of the drafter with weights, 0: it does not run."""
    by_row: tuple[str | None, ...]
    """Whose guesses each row takes, None: nobody's."""
    promised: float = 0.0
    """Guesses of all rows that should be right."""


@dataclass(frozen=True)
class Menu:
    """What a cycle may do: pairs of (depth, drafted)."""

    pairs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, depths: Iterable[int], drafted: Iterable[int]) -> Menu:
        return cls(tuple((d, n) for n in sorted(drafted) for d in sorted(depths) if d >= n))

    @classmethod
    def filled(cls, depths: Iterable[int], weighted: bool) -> Menu:
        """Of loops in which the drafter with weights, if any, makes all guesses or none."""
        return cls(tuple((d, n) for d in sorted(depths) for n in {0, d if weighted else 0}))


@dataclass
class Policy:
    """Chooses, and learns from what came. `weighted` is the drafter with weights, if any."""

    k: int
    costs: Costs
    menu: Menu
    weighted: str | None = None
    tables: dict[str, Survival] = field(default_factory=dict)
    promises: Promises = field(default_factory=Promises)
    chosen: dict[str, int] = field(default_factory=dict)
    """Rows that took each drafter's guesses so far; `none` where they took nobody's."""
    _rows: float = 0.0
    """Rows that chose lately, discounted as survival is."""
    _offered: dict[str, float] = field(default_factory=dict)
    """Of them, those on which each drafter had guesses."""
    _idle: int = 0
    """Cycles since the drafter with weights ran."""
    _shallow: int = 0
    """Cycles since it guessed more than in the one before."""
    _drafted: int = 0
    """Guesses of its last cycle."""
    _allowance: float = ALLOWANCE
    """Cycles, what is left of it."""
    _tokens: float = 0.0
    """Of a row."""
    _plain_cycles: float = 0.0
    """That would have taken as long."""

    @property
    def speedup(self) -> float:
        """Over plain decoding, at present; before any tokens came plain decoding's own, for time
        that is worth nothing would be spent on the longest drafts of all rows."""
        return self._tokens / self._plain_cycles if self._plain_cycles else 1.0

    def table(self, drafter: str) -> Survival:
        if drafter not in self.tables:
            self.tables[drafter] = Survival(self.k)
        return self.tables[drafter]

    def share(self, drafter: str) -> float:
        """Of rows lately, those on which it had guesses; 1 before any."""
        return self._offered.get(drafter, 0.0) / self._rows if self._rows else 1.0

    def choose(self, rows: Seqs[RowOffers]) -> Choice:
        """The best of the menu. The drafter with weights runs where a request insists, and where
        it did not run for long."""
        pairs = self.menu.pairs
        runs = [pair for pair in pairs if pair[1]]
        tried = bool(runs) and self._idle >= SHADOW and self._may_try(runs, len(rows))
        if tried:
            self._idle = 0  # what comes of it may be heard of later
        if tried or (runs and any(r.insists and r.most for r in rows)):
            pairs = runs
        alike = Counter(rows)  # many rows of a batch have the same to choose from
        self._count(alike)
        rate = self.speedup * len(rows) / self._plain(len(rows))
        best = max(pairs, key=lambda pair: self._worth(alike, rate, *pair))
        if not tried and (deeper := self._untried(best, len(rows))):
            pairs = [pair for pair in pairs if pair[1] == deeper]
            best = max(pairs, key=lambda pair: self._worth(alike, rate, *pair))
        whose = {row: self._best(row, *best)[1] for row in alike}
        return Choice(*best, tuple(whose[row] for row in rows), self._right(alike, *best))

    def learn(self, choice: Choice, emitted: float, ended: float = 0.0) -> None:
        """The cycle emitted so many tokens, over all rows. ended: rows that had come to their end
        before it, and said nothing: what they were promised was not broken."""
        self._idle = 0 if choice.drafted or self.weighted is None else self._idle + 1
        self._shallow = 0 if choice.drafted > self._drafted else self._shallow + 1
        self._drafted = choice.drafted
        rows = len(choice.by_row)
        live = rows - ended
        self.promises.learn(
            (choice.depth, choice.drafted), choice.promised * live / rows, emitted - live
        )
        seconds = self.costs.seconds(Work(rows, choice.depth, choice.drafted))
        self._tokens = self._tokens * FADE + emitted / rows
        self._plain_cycles = self._plain_cycles * FADE + seconds / self._plain(rows)
        for name in choice.by_row:
            self.chosen[name or "none"] = self.chosen.get(name or "none", 0) + 1

    def _count(self, alike: Counter[RowOffers]) -> None:
        """Who had guesses on these rows."""
        self._rows = self._rows * DISCOUNT + alike.total()
        for name in self._offered:
            self._offered[name] *= DISCOUNT
        for row, n in alike.items():
            for offer in row.offers:
                self._offered[offer.drafter] = self._offered.get(offer.drafter, 0.0) + n

    def _may_try(self, runs: Iterable[tuple[int, int]], rows: int) -> bool:
        """Whether the drafter with weights did not run for so long that the cheapest of its cycles
        takes no more than TRIALS of the time since."""
        least = min(self.costs.seconds(Work(rows, *pair)) for pair in runs)
        return least / self._plain(rows) - 1 <= TRIALS * self._idle

    def _untried(self, best: tuple[int, int], rows: int) -> int:
        """The next longer draft, where it has not been tried for as long as it costs, or what is
        left of the allowance pays for it; else 0. How far guesses hold is not seen beyond where
        drafts end."""
        deeper = [pair for pair in self.menu.pairs if pair[1] > best[1] > 0]
        if not deeper or self._shallow < APART:
            return 0
        pair = min(deeper, key=lambda pair: (pair[1], pair[0]))
        took, takes = (self.costs.seconds(Work(rows, *p)) for p in (best, pair))
        beyond = takes / took - 1 - DEEPER * self._shallow
        if beyond > self._allowance:
            return 0
        self._allowance, self._shallow = self._allowance - max(beyond, 0.0), 0
        return pair[1]

    def _worth(self, alike: Counter[RowOffers], rate: float, depth: int, drafted: int) -> float:
        """rate: tokens per second at present."""
        right = self._right(alike, depth, drafted) * self.promises.kept((depth, drafted))
        rows = alike.total()
        return rows + right - rate * self.costs.seconds(Work(rows, depth, drafted))

    def _right(self, alike: Counter[RowOffers], depth: int, drafted: int) -> float:
        """Guesses of all rows that should be right, as the survival tables have it."""
        return sum(n * self._best(row, depth, drafted)[0] for row, n in alike.items())

    def _plain(self, rows: int) -> float:
        """Seconds of a cycle without guesses."""
        return self.costs.seconds(Work(rows, 0, 0))

    def _best(self, row: RowOffers, depth: int, drafted: int) -> tuple[float, str | None]:
        """Most guesses that are right on average, and whose; the first of equals."""
        best: tuple[float, str | None] = (0.0, None)
        beside = any(offer.drafter == self.weighted for offer in row.offers)
        for offer in row.offers:
            made = min(offer.guesses, drafted) if offer.drafter == self.weighted else offer.guesses
            count = min(made, depth, row.most)
            value = self.table(offer.drafter).expected(offer.bucket)[count]
            if beside and offer.drafter != self.weighted and offer.bucket < LONG:
                value *= BESIDE_WEIGHTS
            if value > best[0]:
                best = value, offer.drafter
        return best
