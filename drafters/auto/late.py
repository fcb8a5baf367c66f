"""The choice for a device loop: made by the host before each dispatch, from what earlier ones said.

The device guesses; the host judges. A text drafter on the host looks at the text as far as it is
known there, so every text drafter is judged by what comes next, whoever guesses. The drafter with
weights is judged by how many guesses were accepted on rows that were its own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence as Seqs
from dataclasses import dataclass

import numpy as np

from drafters.auto.host import NAME, AutoDrafter, matched
from specdec.core.policy.choice import Choice, Menu, Policy, RowOffers
from specdec.core.policy.costs import Work
from specdec.core.policy.survival import bucket_of
from specdec.core.types import NO_GUESS, Array, Sequence

NOBODY, TEXT, WEIGHTS, EITHER = range(4)
"""Whose guesses a row takes: EITHER is the text's where it has any, else those by weights."""


@dataclass
class _Seen:
    """What the host knew of a row when it last chose."""

    seq: Sequence
    length: int
    lengths: Counter[int]
    bucket: int
    guesses: list[int]
    take: int


class LateChooser:
    """One drafter that reads the text, which the device has a step for, and one with weights."""

    def __init__(self, drafter: AutoDrafter, text: str, slots: int, off: bool) -> None:
        """off: whether a cycle without guesses is one of its own, narrower than others."""
        self._drafter, self._text = drafter, text
        k = drafter.policy.k  # a dispatch guesses and verifies all of them
        depths = {0, k} if off else {k}
        drafter.policy.menu = Menu.of(depths, {0} if drafter.weighted is None else {0, k})
        self._seen: dict[int, _Seen] = {}
        self._last: tuple[float, Choice] | None = None
        self.take = np.zeros(slots, np.int32)
        """[slots]: NOBODY, TEXT, WEIGHTS or EITHER."""
        self.runs, self.depth = False, k
        """Whether the drafter with weights guesses; how many guesses are verified."""

    @property
    def _policy(self) -> Policy:
        return self._drafter.policy

    def choose(self, seqs: Seqs[Sequence]) -> None:
        """Learn from what came, and choose for the next dispatch of these rows."""
        cycles, emitted = self._learn(seqs)
        guesses = np.asarray(self._drafter.texts[self._text].propose(seqs, self._policy.k))
        offers = [self._offers(seq, row) for seq, row in zip(seqs, guesses, strict=True)]
        self._tell(len(seqs), cycles, emitted)
        choice = self._drafter.chosen(offers)
        self._last = time.perf_counter(), choice
        self.runs, self.depth = choice.drafted > 0, choice.depth
        for seq, row, name in zip(seqs, guesses, choice.by_row, strict=True):
            take = self.take[seq.slot] = self._code(seq, name)
            bucket = bucket_of(matched(self._drafter.texts[self._text], seq))
            known = [t for t in row.tolist() if t != NO_GUESS]
            lengths = Counter(seq.acceptance.lengths)
            self._seen[seq.slot] = _Seen(seq, len(seq.tokens), lengths, bucket, known, int(take))

    def _learn(self, seqs: Seqs[Sequence]) -> tuple[int, int]:
        """-> cycles since the last choice, and tokens that they emitted over all rows."""
        cycles = emitted = 0
        for seq in seqs:
            seen = self._seen.get(seq.slot)
            if seen is None or seen.seq is not seq or len(seq.tokens) == seen.length:
                continue
            came = seq.tokens[seen.length :]
            kept = Counter(seq.acceptance.lengths)
            kept.subtract(seen.lengths)
            cycles, emitted = max(cycles, kept.total()), emitted + len(came)
            if self._drafter.forced is None:
                self._judge(seen, came, +kept, len(seqs))
        return cycles, emitted

    def _judge(self, seen: _Seen, came: list[int], kept: Counter[int], rows: int) -> None:
        both = min(len(seen.guesses), len(came))
        agreed = np.array(seen.guesses[:both]) == np.array(came[:both])
        table, right = self._policy.table(self._text), int(agreed.cumprod().sum())
        table.learn(seen.bucket, right, len(seen.guesses), len(came), rows)
        weighted = self._drafter.weighted
        if weighted is None or seen.take != WEIGHTS or not self.runs:
            return
        k = self._policy.k
        for right in kept.elements():
            self._policy.table(weighted.name).learn(
                self._drafter.fared(seen.seq), right, k, right + 1, rows
            )
            self._drafter.note(seen.seq, right)

    def _tell(self, rows: int, cycles: int, emitted: int) -> None:
        """What the last dispatch's cycles took and brought."""
        if self._last is None or not cycles:
            return
        began, choice = self._last
        if len(choice.by_row) == rows:
            work = Work(rows, choice.depth, choice.drafted)
            self._policy.costs.saw(work, (time.perf_counter() - began) / cycles)
        if self._drafter.forced is None:
            self._policy.learn(choice, emitted / cycles)

    def _offers(self, seq: Sequence, row: Array) -> RowOffers:
        return self._drafter.offers(seq, {self._text: row}, self._policy.k)

    def _code(self, seq: Sequence, name: str | None) -> int:
        if name is None:
            return NOBODY
        if name != self._text:
            return WEIGHTS
        wish = seq.speculative
        free = wish is None or wish.drafter in (None, NAME)
        return EITHER if free and self.runs else TEXT
