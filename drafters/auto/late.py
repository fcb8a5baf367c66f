"""The choice for a device loop, made by the host before each dispatch from earlier ones' results.

The device guesses; the host judges. A text drafter on the host guesses from the text as far as it
has been read there, and is judged by the tokens that come next, whichever drafter's guesses were
verified. The drafter with weights is judged by the number of guesses accepted on rows that took its
guesses. A loop may choose for one dispatch before it reads the one before: tokens that arrive
belong to the oldest dispatch that has not been read.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence as Seqs, Set
from dataclasses import dataclass

import numpy as np

from drafters.auto.host import NAME, AutoDrafter
from specdec.core.constraint import KNOWN, guided, known_by_source
from specdec.core.policy.choice import Choice, Menu, Policy
from specdec.core.policy.costs import Work
from specdec.core.types import NO_GUESS, CycleChoice, Sequence

NO_SOURCE = 0
"""A row takes no guesses."""
TEXT = 1
"""A row takes the text drafter's guesses."""
WEIGHTS = 2
"""A row takes the guesses of the drafter with weights."""
EITHER = TEXT | WEIGHTS
"""A row takes the text drafter's guesses where it has any, else those of the drafter with
weights."""


@dataclass
class _Seen:
    """A row's text on the host at the last choice, and the guesses that followed from it: lookup's,
    and those of `KNOWN`."""

    seq: Sequence
    length: int
    lengths: Counter[int]
    guesses: dict[str, list[int]]


@dataclass(frozen=True)
class _Taken:
    """The guesses that a row takes, and the buckets at that time, a cycle before the row began
    it."""

    seq: Sequence
    take: int
    buckets: dict[str, int]
    """Of lookup and of `KNOWN`, where they had guesses."""
    fared: int
    """The bucket of the drafter with weights."""


@dataclass(frozen=True)
class _Dispatch:
    """One choice: as a whole, and by slot."""

    choice: Choice
    taken: dict[int, _Taken]
    context: int
    """Tokens of all rows when it was chosen."""

    def of(self, seq: Sequence) -> _Taken | None:
        taken = self.taken.get(seq.slot)
        return taken if taken is not None and taken.seq is seq else None


UNREAD = 1
"""Most dispatches that a loop has launched and not read when it calls `ready` again."""


class LateChooser:
    """One drafter that reads the text, which the device has a step for, and one with weights."""

    def __init__(self, drafter: AutoDrafter, text: str, slots: int, depths: Set[int]) -> None:
        """depths: how many guesses a cycle may verify; the drafter with weights makes as many."""
        self._drafter, self._text = drafter, text
        drafter.policy.menu = Menu.filled(depths, drafter.weighted is not None)
        self._padded = 0 not in depths  # every cycle verifies as many guesses
        self._seen: dict[int, _Seen] = {}
        self._unheard: deque[_Dispatch] = deque()
        self._prompt_reads: deque[int] = deque(maxlen=1 + UNREAD)
        """The policy's, at the last choices: a dispatch ends after the choice behind its own."""
        self._asked = 0.0
        self.take = np.zeros(slots, np.int32)
        """[slots]: one of the codes above."""
        self.runs = False
        """Whether the drafter with weights guesses."""
        self.choice = CycleChoice(drafter.policy.k, takes_known=False)
        """The last choice. If any row takes tokens of `KNOWN`, the loop puts these first in all
        rows."""

    @property
    def names(self) -> tuple[str, ...]:
        """`Proposal.names`, indexed by a row's code in `take`."""
        weighted = self._drafter.weighted
        return self._text, self._text, weighted.name if weighted else self._text, self._text

    @property
    def _policy(self) -> Policy:
        return self._drafter.policy

    def choose(self, seqs: Seqs[Sequence]) -> CycleChoice:
        """Update the statistics from new tokens, and choose for these rows' next dispatch."""
        self._hear(seqs)
        k = self._policy.k
        text = np.asarray(self._drafter.texts[self._text].propose(seqs, k).tokens)
        guesses = known_by_source(seqs, k) | {self._text: text}
        rows = [{name: draft[b] for name, draft in guesses.items()} for b in range(len(seqs))]
        offers = [self._drafter.offers(seq, row, k) for seq, row in zip(seqs, rows, strict=True)]
        self._asked = time.perf_counter()
        choice = self._drafter.chosen(offers, seqs)
        self.runs = choice.drafted > 0
        takes_known = self._takes_known(choice, seqs, bool(guesses.keys() & KNOWN))
        taken: dict[int, _Taken] = {}
        for seq, row, name in zip(seqs, rows, choice.by_row, strict=True):
            drafts = {
                source: [t for t in own.tolist() if t != NO_GUESS] for source, own in row.items()
            }
            drafts = {source: draft for source, draft in drafts.items() if draft}
            if takes_known and any(source in KNOWN for source in drafts):
                take = EITHER if self.runs else NO_SOURCE  # behind what the loop puts first
            else:
                take = self._code(seq, name)
            self.take[seq.slot] = take
            lengths = Counter(seq.acceptance.lengths)
            self._seen[seq.slot] = _Seen(seq, len(seq.tokens), lengths, drafts)
            buckets = {source: self._drafter.bucket(source, seq) for source in drafts}
            taken[seq.slot] = _Taken(seq, take, buckets, self._drafter.fared(seq))
        self._unheard.append(_Dispatch(choice, taken, self._policy.context))
        self._prompt_reads.append(self._policy.prompt_reads)
        variant = "weights" if self.runs else "text"
        self.choice = CycleChoice(choice.depth, variant, takes_known, self._repeats(choice))
        return self.choice

    def _takes_known(self, choice: Choice, seqs: Seqs[Sequence], known: bool) -> bool:
        """Also for one more cycle after a prediction has stopped matching: it may go on."""
        if any(name in KNOWN for name in choice.by_row):
            return True
        return self.choice.takes_known and not known and guided(seqs)

    def _repeats(self, choice: Choice) -> bool:
        """A match of lookup may end with any cycle, and then the drafter with weights would have
        guessed; where matches hold longer than its guesses, one may come with any."""
        weighted, k = self._drafter.weighted, self._policy.k
        if weighted is None or not any(choice.by_row):
            return True
        text, own = (self._policy.table(name).overall()[k] for name in (self._text, weighted.name))
        return self.runs and text <= own

    def take_back(self) -> None:
        """The last choice is not launched."""
        self._unheard.pop()
        self._prompt_reads.pop()

    def _hear(self, seqs: Seqs[Sequence]) -> None:
        """Update the statistics with the oldest unread dispatch, if any of its rows has new
        tokens."""
        while self._unheard and not any(self._unheard[0].of(s) for s in seqs):
            self._unheard.popleft()  # all of its rows have ended
        if self._unheard and any(self._has_news(seq) for seq in seqs):
            dispatch = self._unheard.popleft()
            self._tell(dispatch, len(seqs), *self._learn(dispatch, seqs))
        while len(self._unheard) > UNREAD:  # a dispatch that failed
            self._unheard.popleft()

    def _has_news(self, seq: Sequence) -> bool:
        seen = self._seen.get(seq.slot)
        return seen is not None and seen.seq is seq and len(seq.tokens) > seen.length

    def _learn(self, dispatch: _Dispatch, seqs: Seqs[Sequence]) -> tuple[int, int, int]:
        """-> its number of cycles, all rows' new tokens, and the sum of its rows' cycles."""
        cycles = emitted = row_cycles = 0
        for seq in filter(self._has_news, seqs):
            seen = self._seen[seq.slot]
            came = seq.tokens[seen.length :]
            kept = Counter(seq.acceptance.lengths)
            kept.subtract(seen.lengths)
            own = kept.total()
            cycles, emitted, row_cycles = max(cycles, own), emitted + len(came), row_cycles + own
            taken = dispatch.of(seq)
            if self._drafter.forced is None and taken is not None:
                for name, bucket in taken.buckets.items():
                    self._judge(name, bucket, seen.guesses.get(name, []), came, len(seqs))
                if taken.take == WEIGHTS and dispatch.choice.drafted:
                    self._judge_weights(taken, +kept, dispatch.choice.drafted, len(seqs))
        return cycles, emitted, row_cycles

    def _judge(
        self, name: str, bucket: int, guesses: list[int], came: list[int], rows: int
    ) -> None:
        """guesses: from the text at which the row began the cycle. bucket: from a cycle before; if
        there are no guesses any more, that counts as a wrong guess."""
        both = min(len(guesses), len(came))
        agreed = np.array(guesses[:both]) == np.array(came[:both])
        right = int(agreed.cumprod().sum())
        self._policy.table(name).learn(bucket, right, max(len(guesses), 1), len(came), rows)

    def _judge_weights(self, taken: _Taken, kept: Counter[int], drafted: int, rows: int) -> None:
        """kept: cycles by how many of its `drafted` guesses were right."""
        weighted = self._drafter.weighted
        assert weighted is not None
        for right in kept.elements():
            self._policy.table(weighted.name).learn(taken.fared, right, drafted, right + 1, rows)
            self._drafter.remember(taken.seq, right, drafted)

    def _tell(
        self, dispatch: _Dispatch, rows: int, cycles: int, emitted: int, row_cycles: int
    ) -> None:
        """Record a dispatch's time and tokens. The last three arguments are `_learn`'s results. The
        host sees the end of a row one dispatch late."""
        choice = dispatch.choice
        undisturbed = self._prompt_reads[0] == self._policy.prompt_reads
        if len(choice.by_row) == rows and undisturbed:
            work = Work(rows, choice.depth, choice.drafted, dispatch.context)
            self._policy.costs.saw(work, (time.perf_counter() - self._asked) / cycles)
        if self._drafter.forced is None:
            ended = max(0.0, len(choice.by_row) - row_cycles / cycles)
            self._policy.learn(choice, emitted / cycles, ended)

    def _code(self, seq: Sequence, name: str | None) -> int:
        wish = None if seq.speculative is None else seq.speculative.drafter
        free = wish in (None, NAME)
        if name is None:  # a match may come in a later cycle; all depths are verified anyway
            return TEXT if self._padded and (free or wish == self._text) else NO_SOURCE
        if name != self._text:
            return WEIGHTS
        return EITHER if free and self.runs else TEXT
