"""The policy: which drafter guesses for each row, and how many tokens a cycle verifies.

The long-run rate tokens / time is highest if each cycle maximises E[tokens] - rate * time
(Dinkelbach 1967). The rate is kept as a speed-up over plain decoding of as many rows, because batch
sizes change faster than a rate can be estimated. Tokens are estimated from survival tables, time
from a cost table. A draft of no tokens turns speculation off. The choice affects only the speed,
never a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence as Seqs
from dataclasses import dataclass, field

from specdec.core.policy.costs import Costs, Work
from specdec.core.policy.promises import Promises
from specdec.core.policy.survival import DISCOUNT, Survival

SHADOW = 32
"""Cycles after which a drafter with weights that does not pay is tried again, as the text may have
changed."""
TRIALS = 0.01
"""Share of the time that trials of a drafter that does not pay may take."""
DEEPER = 0.03
"""Share of the time that trials of longer drafts may take: more, as these emit more tokens."""
APART = 4
"""Fewest cycles between trials of longer drafts."""
ALLOWANCE = 0.7
"""Time, in cycles, that trials of longer drafts may take beyond DEEPER: a few trials at the start,
since longer drafts can't be judged before they were tried."""
FADE = 0.97
"""Discount of tokens and time per cycle: the speed-up covers about the last thirty cycles."""
BESIDE_WEIGHTS = 0.7
"""Weight of lookup's expected right guesses on a row where a drafter with weights could guess
instead. Their means don't show that both fail at the same hard tokens: a lookup draft that ends
before such a token wastes a cycle, since the next cycle gets no further than the drafter with
weights would have got in this one."""
LONG = 6
"""Bucket of lookup (`survival.bucket_of`) from which its guesses count in full nevertheless: a
match this long is a copy."""


@dataclass(frozen=True)
class Offer:
    """One drafter's possible guesses on one row."""

    drafter: str
    bucket: int
    """The strength of its evidence, see `survival.bucket_of`."""
    guesses: int
    """Number of its guesses; for a drafter with weights, the number that it could make."""


@dataclass(frozen=True)
class RowOffers:
    """The offers of all drafters on one row of a cycle."""

    offers: tuple[Offer, ...]
    most: int
    """Most guesses: the request's own limit."""
    insists: bool = False
    """Whether the request names the drafter with weights."""


@dataclass(frozen=True)
class Choice:
    """The policy's decision for one cycle."""

    depth: int
    """Draft tokens that are verified, per row."""
    drafted: int
    """Guesses per row of the drafter with weights, 0: it does not run."""
    by_row: tuple[str | None, ...]
    """The drafter of each row's guesses, None: no guesses."""
    promised: float = 0.0
    """Expected number of right guesses, summed over all rows."""


@dataclass(frozen=True)
class Menu:
    """The possible cycles: pairs of (depth, drafted)."""

    pairs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, depths: Iterable[int], drafted: Iterable[int]) -> Menu:
        return cls(tuple((d, n) for n in sorted(drafted) for d in sorted(depths) if d >= n))

    @classmethod
    def filled(cls, depths: Iterable[int], weighted: bool) -> Menu:
        """The menu of loops in which the drafter with weights, if any, makes all guesses or
        none."""
        return cls(tuple((d, n) for d in sorted(depths) for n in {0, d if weighted else 0}))


@dataclass
class Policy:
    """Chooses each cycle's drafter and depth, and updates its estimates from the outcomes.
    `weighted` is the drafter with weights, if any."""

    k: int
    costs: Costs
    menu: Menu
    weighted: str | None = None
    tables: dict[str, Survival] = field(default_factory=dict)
    promises: Promises = field(default_factory=Promises)
    chosen: dict[str, int] = field(default_factory=dict)
    """Rows so far by the drafter of their draft; `none` for rows without guesses."""
    context: int = 0
    """Tokens of all rows' texts, as the drafter found them before the last choice."""
    prompt_reads: int = 0
    """Calls so far that read prompts. A cycle beside one seems to take longer than it does."""
    _rows: float = 0.0
    """Recent rows, discounted like survival."""
    _offered: dict[str, float] = field(default_factory=dict)
    """By drafter, the recent rows on which it had guesses."""
    _idle: int = 0
    """Cycles since the drafter with weights ran."""
    _shallow: int = 0
    """Cycles since it guessed more than in the cycle before."""
    _drafted: int = 0
    """Its guesses in the last cycle."""
    _allowance: float = ALLOWANCE
    """The rest of ALLOWANCE, in cycles."""
    _tokens: float = 0.0
    """Tokens per row, discounted."""
    _plain_cycles: float = 0.0
    """The time of the same cycles, as a number of plain cycles, discounted."""

    @property
    def speedup(self) -> float:
        """The current speed-up over plain decoding; 1 before the first tokens, since with 0 time
        would cost nothing and the longest drafts would always win."""
        return self._tokens / self._plain_cycles if self._plain_cycles else 1.0

    def table(self, drafter: str) -> Survival:
        if drafter not in self.tables:
            self.tables[drafter] = Survival(self.k)
        return self.tables[drafter]

    def share(self, drafter: str) -> float:
        """Share of the recent rows on which the drafter had guesses; 1 before the first row."""
        return self._offered.get(drafter, 0.0) / self._rows if self._rows else 1.0

    def choose(self, rows: Seqs[RowOffers]) -> Choice:
        """The best cycle of the menu. The drafter with weights always runs if a request names it,
        or if a trial is due."""
        pairs = self.menu.pairs
        runs = [pair for pair in pairs if pair[1]]
        tried = bool(runs) and self._idle >= SHADOW and self._may_try(runs, len(rows))
        if tried:
            self._idle = 0  # now, as the outcome may be reported some cycles later
        if tried or (runs and any(r.insists and r.most for r in rows)):
            pairs = runs
        alike = Counter(rows)  # many rows of a batch have equal offers
        self._count(alike)
        rate = self.speedup * len(rows) / self._plain(len(rows))
        best = max(pairs, key=lambda pair: self._worth(alike, rate, *pair))
        if not tried and (deeper := self._untried(best, len(rows))):
            pairs = [pair for pair in pairs if pair[1] == deeper]
            best = max(pairs, key=lambda pair: self._worth(alike, rate, *pair))
        drafters = {row: self._best(row, *best)[1] for row in alike}
        return Choice(*best, tuple(drafters[row] for row in rows), self._right(alike, *best))

    def learn(self, choice: Choice, emitted: float, ended: float = 0.0) -> None:
        """Update the estimates after a cycle. emitted: its tokens, over all rows. ended: rows that
        had ended before the cycle and emitted nothing; they don't count as wrong guesses."""
        self._idle = 0 if choice.drafted or self.weighted is None else self._idle + 1
        self._shallow = 0 if choice.drafted > self._drafted else self._shallow + 1
        self._drafted = choice.drafted
        rows = len(choice.by_row)
        live = rows - ended
        self.promises.learn(
            (choice.depth, choice.drafted), choice.promised * live / rows, emitted - live
        )
        seconds = self._seconds(rows, choice.depth, choice.drafted)
        self._tokens = self._tokens * FADE + emitted / rows
        self._plain_cycles = self._plain_cycles * FADE + seconds / self._plain(rows)
        for name in choice.by_row:
            self.chosen[name or "none"] = self.chosen.get(name or "none", 0) + 1

    def _count(self, alike: Counter[RowOffers]) -> None:
        """Count the rows, and by drafter those on which it had guesses."""
        self._rows = self._rows * DISCOUNT + alike.total()
        for name in self._offered:
            self._offered[name] *= DISCOUNT
        for row, n in alike.items():
            for offer in row.offers:
                self._offered[offer.drafter] = self._offered.get(offer.drafter, 0.0) + n

    def _may_try(self, runs: Iterable[tuple[int, int]], rows: int) -> bool:
        """Whether the drafter with weights has not run for so long that its cheapest cycle takes at
        most TRIALS of the time since."""
        least = min(self._seconds(rows, *pair) for pair in runs)
        return least / self._plain(rows) - 1 <= TRIALS * self._idle

    def _untried(self, best: tuple[int, int], rows: int) -> int:
        """The next longer draft, if its last trial is long enough ago for its cost, or the rest of
        the allowance covers it; else 0. Trials are needed because a draft shows nothing about
        acceptance beyond its end."""
        deeper = [pair for pair in self.menu.pairs if pair[1] > best[1] > 0]
        if not deeper or self._shallow < APART:
            return 0
        pair = min(deeper, key=lambda pair: (pair[1], pair[0]))
        took, takes = (self._seconds(rows, *p) for p in (best, pair))
        beyond = takes / took - 1 - DEEPER * self._shallow
        if beyond > self._allowance:
            return 0
        self._allowance, self._shallow = self._allowance - max(beyond, 0.0), 0
        return pair[1]

    def _worth(self, alike: Counter[RowOffers], rate: float, depth: int, drafted: int) -> float:
        """The value that a cycle maximises, in tokens. rate: current tokens per second."""
        right = self._right(alike, depth, drafted) * self.promises.kept((depth, drafted))
        rows = alike.total()
        return rows + right - rate * self._seconds(rows, depth, drafted)

    def _right(self, alike: Counter[RowOffers], depth: int, drafted: int) -> float:
        """Expected right guesses of all rows by the survival tables."""
        return sum(n * self._best(row, depth, drafted)[0] for row, n in alike.items())

    def _plain(self, rows: int) -> float:
        """Seconds of a cycle without guesses."""
        return self._seconds(rows, 0, 0)

    def _seconds(self, rows: int, depth: int, drafted: int) -> float:
        return self.costs.seconds(Work(rows, depth, drafted, self.context))

    def _best(self, row: RowOffers, depth: int, drafted: int) -> tuple[float, str | None]:
        """The largest expected number of right guesses on a row and its drafter; the first of
        equals."""
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
