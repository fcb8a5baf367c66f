"""Several drafters as one: in each cycle a policy chooses each row's drafter and number of guesses.

Drafters that read the text guess in every cycle, and each is judged by the tokens that came. The
drafter with weights guesses where that pays, and now and then to be judged.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence as Seqs
from dataclasses import dataclass

import numpy as np

from specdec.core.constraint import KNOWN, known_by_source, put_forced_first
from specdec.core.policy.choice import Choice, Offer, Policy, RowOffers
from specdec.core.policy.costs import Work
from specdec.core.policy.survival import BUCKETS, bucket_of
from specdec.core.protocols import Drafter, LookupDrafter
from specdec.core.types import NO_GUESS, Array, Proposal, Sequence, Step


@dataclass(frozen=True)
class Weighted:
    """The drafter with weights."""

    name: str
    drafter: Drafter


@dataclass
class _Turn:
    """A cycle under way."""

    began: float
    choice: Choice
    offers: list[RowOffers]
    guesses: dict[str, Array]
    """[B, at most k] of each drafter that guessed, and of `KNOWN`."""


class AutoDrafter:
    """The host loop's drafter. It returns as many guesses as pay: [B, 0 .. k]."""

    def __init__(
        self, texts: Mapping[str, LookupDrafter], weighted: Weighted | None, policy: Policy
    ) -> None:
        """texts: drafters that need the text alone."""
        self.texts, self.weighted, self.policy = texts, weighted, policy
        self.forced: tuple[int, int] | None = None
        """(depth, drafted) of every cycle, while costs are measured."""
        self._fared: dict[int, int] = {}
        self._turn: _Turn | None = None

    @property
    def parts(self) -> dict[str, Drafter]:
        """All of them, by name."""
        own = {} if self.weighted is None else {self.weighted.name: self.weighted.drafter}
        return {**self.texts, **own}

    @property
    def _weights(self) -> tuple[str, ...]:
        return () if self.weighted is None else (self.weighted.name,)

    def reset(self, seq: Sequence) -> None:
        self._fared[seq.slot] = 1
        for part in self.parts.values():
            part.reset(seq)

    def prefill(self, seq: Sequence, start: int, stop: int, step: Step) -> None:
        for part in self.parts.values():
            part.prefill(seq, start, stop, step)

    def propose(self, seqs: Seqs[Sequence], k: int) -> Proposal:
        began = time.perf_counter()
        own = {name: np.asarray(d.propose(seqs, k).tokens) for name, d in self.texts.items()}
        guesses = known_by_source(seqs, k) | own
        rows = ({name: draft[b] for name, draft in guesses.items()} for b in range(len(seqs)))
        offers = [self.offers(seq, row, k) for seq, row in zip(seqs, rows, strict=True)]
        choice = self.chosen(offers, seqs)
        if choice.drafted:
            assert self.weighted is not None
            made = self.weighted.drafter.propose(seqs, choice.drafted)
            guesses[self.weighted.name] = np.asarray(made.tokens)
        self._turn = _Turn(began, choice, offers, guesses)
        names = (*self.texts, *KNOWN, *(self._weights or ("drafter",)))
        source = _sources(choice, guesses, names)
        return Proposal(self._draft(choice, guesses, len(seqs)), source, names)

    def observe(self, seqs: Seqs[Sequence], step: Step, accepted: Array) -> None:
        chosen, kept = np.asarray(step.chosen), np.asarray(accepted)
        for part in self.texts.values():
            part.observe(seqs, step, accepted)
        if self.weighted is not None:
            self.weighted.drafter.observe(seqs, step, accepted)
        turn, self._turn = self._turn, None
        if turn is None:
            return  # a warm-up's draft, not made by `propose`
        depth, context = chosen.shape[1] - 1, self.policy.context
        work = Work(len(seqs), depth, turn.choice.drafted, context)
        self.policy.costs.saw(work, time.perf_counter() - turn.began)
        if self.forced is not None:
            return
        for b, seq in enumerate(seqs):
            self._judge(turn, b, seq, chosen[b, : int(kept[b]) + 1])
        self.policy.learn(turn.choice, int((kept + 1).sum()))

    def chosen(self, offers: list[RowOffers], seqs: Seqs[Sequence]) -> Choice:
        """The policy's choice, or the forced one while costs are measured."""
        self.policy.context = sum(len(seq.tokens) for seq in seqs)
        if self.forced is None:
            return self.policy.choose(offers)
        runs = self.weighted is not None and self.forced[1] > 0
        return Choice(*self.forced, (self.weighted.name if runs else None,) * len(offers))  # pyright: ignore[reportOptionalMemberAccess]

    def fared(self, seq: Sequence) -> int:
        """The bucket of the drafter with weights: how many guesses were right on that row last."""
        return self._fared[seq.slot]

    def remember(self, seq: Sequence, right: int, guessed: int) -> None:
        """So many of its guesses were right, at least: if all of a short draft were, it might have
        gone further."""
        further = right == guessed < self.policy.k
        least = self._fared[seq.slot] if further else 0
        self._fared[seq.slot] = max(bucket_of(right + 1), least)

    def offers(self, seq: Sequence, guesses: Mapping[str, Array], k: int) -> RowOffers:
        """The drafters that a row can take. guesses [k]: of each text drafter of the loop, and of
        `KNOWN`, which apply to every request."""
        wish, most = seq.speculative, seq.most_guesses(k)
        offers = [
            Offer(name, self.bucket(name, seq), count)
            for name, draft in guesses.items()
            if (count := _count(draft))
        ]
        if self.weighted is not None:
            offers.append(Offer(self.weighted.name, self.fared(seq), k))
        if wish is not None and wish.drafter is not None and wish.drafter != NAME:
            offers = [offer for offer in offers if offer.drafter in (wish.drafter, *KNOWN)]
        insists = wish is not None and wish.drafter is not None and wish.drafter in self._weights
        return RowOffers(tuple(offers), most, insists)

    def bucket(self, name: str, seq: Sequence) -> int:
        """The survival bucket of this text drafter, or of one of `KNOWN`: the longer its match with
        the text, the higher."""
        if name == "constraint":
            return BUCKETS - 1
        if name == "prediction":
            assert seq.prediction is not None
            return bucket_of(seq.prediction.agreeing(seq.tokens))
        return bucket_of(self.texts[name].matched(seq))

    def _draft(self, choice: Choice, guesses: Mapping[str, Array], rows: int) -> Array:
        draft = np.full((rows, choice.depth), NO_GUESS, np.int32)
        for b, name in enumerate(choice.by_row):
            if name is not None:
                own = guesses[name][b, : choice.depth]
                draft[b, : len(own)] = own
        if not choice.drafted or self.weighted is None:
            return draft
        tail = np.full_like(draft, NO_GUESS)
        made = guesses[self.weighted.name][:, : choice.depth]
        tail[:, : made.shape[1]] = made
        taken = np.array([name is not None for name in choice.by_row])[:, None]
        return np.where(taken, put_forced_first(draft, tail), draft).astype(np.int32)

    def _judge(self, turn: _Turn, b: int, seq: Sequence, came: Array) -> None:
        """Compare what each drafter guessed with what came."""
        buckets = {offer.drafter: offer.bucket for offer in turn.offers[b].offers}
        for name, draft in turn.guesses.items():
            own = draft[b, : _count(draft[b])]
            both = min(len(own), len(came))
            right = int((own[:both] == came[:both]).cumprod().sum())
            guessed = len(own)
            if self.weighted is not None and name == self.weighted.name:
                guessed = turn.choice.drafted  # NO_GUESS took as much time as a guess
                self.remember(seq, right, guessed)
            if name in buckets:
                rows = len(turn.offers)
                self.policy.table(name).learn(buckets[name], right, guessed, len(came), rows)


NAME = "auto"


def _sources(choice: Choice, guesses: Mapping[str, Array], names: Seqs[str]) -> Array:
    """`Proposal.source` [B, depth]: the chosen drafter, as far as its guesses go, then the one with
    weights, the last of `names`."""
    source = np.full((len(choice.by_row), choice.depth), len(names) - 1, np.int32)
    for b, name in enumerate(choice.by_row):
        if name is not None:
            source[b, : _count(guesses[name][b, : choice.depth])] = names.index(name)
    return source


def _count(row: Array) -> int:
    """Guesses of a row: those before the first NO_GUESS."""
    none = row == NO_GUESS
    return int(none.argmax()) if none.any() else len(row)
