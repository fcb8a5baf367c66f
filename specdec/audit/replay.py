"""Claimed ids as their own prediction: one read of the weights checks up to K + 1 of them.

The engine chooses as ever; a claim is only guessed from. So all that makes decoding lossless makes
this exact, and the first id that is not the target's choice is the first false one. What comes
after it follows a text that was not the claim, and is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seqs
from dataclasses import dataclass, field, replace

import numpy as np

from drafters.none.host import NoDrafter
from serve.outputs import output_of
from serve.runner import Update
from serve.served_tokenizer import ServedTokenizer
from serve.stream import ChoiceText, Part, Piece, text_of, with_unopened_thoughts
from specdec.audit.receipt import Receipt, commitments_of
from specdec.audit.verdict import GOES_ON, Chosen, Verdict, conditions_of
from specdec.constraints.constraint import unpacked
from specdec.constraints.recite import Recite
from specdec.constraints.vocabulary import Vocabulary
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.errors import UserError
from specdec.core.prediction import PredictedText, Prediction
from specdec.core.protocols import Cycle
from specdec.core.types import (
    Constraint,
    Event,
    FinishReason,
    Round,
    Sampling,
    Sequence,
    TokenLogprob,
)
from targets.backend import LoadedTarget

Progress = Callable[[int], None]
"""Called with the number of ids that were compared since the last time."""


def replayed(
    receipts: Seqs[Receipt],
    target: LoadedTarget,
    tokenizer: ServedTokenizer,
    k: int,
    progress: Progress = lambda count: None,
) -> list[Verdict]:
    """A verdict on each receipt, in their order. They run together, as many as there are slots. k:
    claimed ids that one read checks at most, beside the one that it chooses."""
    replay = Replay(target, tokenizer, k)
    rows = [replay.seated(receipt) for receipt in receipts]
    seated = [row for row in rows if isinstance(row, Row)]
    replay.run(seated, progress)
    replay.look_up([row for row in seated if row.wrong is not None])
    return [row if isinstance(row, Verdict) else replay.verdict(row) for row in rows]


def _once_all_are_read(cycle: Cycle) -> Cycle:
    """Claims go on together, once all that have a slot are read: a cycle of few rows takes nearly
    as long as one of all, and no client waits for a first id."""

    def waiting(seqs: Seqs[Sequence], prefilling: bool) -> list[Round]:
        return [] if prefilling else cycle(seqs, prefilling)

    return waiting


class IdsAlone:
    """In place of `ChoiceText` where no text is claimed and none decides the end: there is no stop
    string, and no call gives it another name."""

    token_count = 0

    def feed(self, update: Update) -> Piece:
        self.token_count += len(update.tokens)
        if update.finish is None:
            return Piece((), (), None)
        return Piece((), (), "stop" if update.finish == "stop" else "length")


@dataclass
class Row:
    """A claim that is replayed."""

    receipt: Receipt
    seq: Sequence
    text: ChoiceText | IdsAlone
    equal: int = 0
    """Ids that were compared, and are the target's."""
    differs: int | None = None
    """The target's id at place `equal`, where it is not the claimed one."""
    finish: str | None = None
    """Why the answer ends after `ended_at` ids; None while it goes on."""
    ended_at: int = 0
    failure: str | None = None
    parts: list[Part] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    looked_up: tuple[Chosen, ...] = ()
    """The ids of `wrong`, with their log-probabilities."""

    @property
    def claimed(self) -> tuple[int, ...]:
        return self.receipt.answer.ids

    @property
    def wrong(self) -> tuple[int, int] | None:
        """The claimed id and the right one at place `equal`, where they differ and the answer has
        not ended before."""
        if self.differs is None or self.finish is not None:
            return None
        return self.claimed[self.equal], self.differs

    def follow(self, event: Event) -> int:
        """Compare what one cycle chose. Returns the number of equal ids."""
        if self.seq.cancelled:
            return 0
        self.failure = event.error
        equal = self._compare(event)
        self._read(event, equal)
        if self.differs is not None or self.finish is not None:
            self.seq.cancelled = True
        return equal

    def _compare(self, event: Event) -> int:
        coming = self.claimed[self.equal : self.equal + len(event.tokens)]
        pairs = zip(event.tokens, coming, strict=False)
        equal = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if equal is None:
            equal = len(coming)
        elif self.differs is None:
            self.differs = event.tokens[equal]
        self.equal += equal
        self.logprobs += (event.logprobs or ())[:equal]
        return equal

    def _read(self, event: Event, equal: int) -> None:
        """The text of the equal ids, and whether they end the answer."""
        whole = equal == len(event.tokens) and self.differs is None
        finish = self._finish(event.finish) if whole else None
        piece = self.text.feed(Update(0, event.tokens[:equal], finish=finish))
        self.parts += piece.parts
        self.finish, self.ended_at = piece.finish, self.text.token_count

    def _finish(self, finish: FinishReason | None) -> FinishReason | None:
        """The engine's, but for the end of the claim, where the replay was to end."""
        at_limit = self.seq.emitted >= self.receipt.limits.max_tokens
        return None if finish == "length" and not at_limit else finish


class Replay:
    """An engine that drafts nothing and guesses from claims, up to k ids at a time."""

    def __init__(self, target: LoadedTarget, tokenizer: ServedTokenizer, k: int) -> None:
        self._target, self._tokenizer, self.k = target, tokenizer, k
        self._vocabulary = Vocabulary(tokenizer)

    def seated(self, receipt: Receipt) -> Row | Verdict:
        """A claim as a sequence, or the refusal of one that can't be replayed."""
        try:
            self._check(receipt)
            return Row(receipt, self._sequence(receipt), self._text(receipt))
        except UserError as problem:
            return Verdict("refused", reason=str(problem), conditions=conditions_of(receipt))

    def run(self, rows: Seqs[Row], progress: Progress) -> None:
        """Replay until each claim is compared, or found false."""
        of = {row.seq: row for row in rows}
        engine = self.engine(len(rows))
        for seq in of:
            engine.submit(seq)
        while not engine.idle:
            if compared := sum(of[event.sequence].follow(event) for event in engine.step()):
                progress(compared)

    def verdict(self, row: Row) -> Verdict:
        """The verdict on a claim that was replayed."""
        found = self._judged(row)
        reads, conditions = row.seq.acceptance.cycles, conditions_of(row.receipt)
        return replace(found, tokens=len(row.claimed), reads=reads, conditions=conditions)

    def _judged(self, row: Row) -> Verdict:
        if row.failure is not None:
            return Verdict("refused", reason=row.failure)
        if row.wrong is not None:
            claimed, right = row.looked_up
            return Verdict("differs", at=row.equal, claimed=claimed, right=right)
        if (end := _false_end(row)) is not None:
            return end
        finish = row.receipt.answer.finish
        if row.receipt.answer.text not in (None, text_of(with_unopened_thoughts(row.parts))):
            return Verdict("text differs")
        false = _false_logprob(row) or _false_commitment(row)
        return false or Verdict("verified", claimed=finish)

    def look_up(self, rows: Seqs[Row]) -> None:
        """Of rows that differ: log-probabilities, before any shaping, of the claimed id and the
        right one. The ids before are recited, and then the id: alternatives end at 20, and a false
        id is seldom among them."""
        asked = {
            self._reciting(row, token): (row, token) for row in rows for token in row.wrong or ()
        }
        if not asked:
            return
        last = {event.sequence: event for event in self.engine(len(asked)).run(list(asked))}
        for seq, (row, token) in asked.items():
            row.looked_up += (Chosen(token, _last_logprob(last[seq], token)),)

    def _reciting(self, row: Row, token: int) -> Sequence:
        prompt = list(row.receipt.prompt.ids)
        return Sequence(
            prompt,
            Sampling(logprobs=0),
            max_tokens=row.equal + 1,
            constraint=Recite([*prompt, *row.claimed[: row.equal], token]),
            reuse=None,
        )

    def _text(self, receipt: Receipt) -> ChoiceText | IdsAlone:
        """Decoding is most of what the host does with an id, so it is left out where it may be."""
        limits = receipt.limits
        if receipt.answer.text is None and not limits.stop and limits.output.tools is None:
            return IdsAlone()
        output = output_of(limits.output, self._tokenizer)
        return ChoiceText(self._tokenizer, limits.stop, output)

    def engine(self, waiting: int) -> Engine:
        """For so many claims at once."""
        drafter = NoDrafter()
        cycle = _once_all_are_read(host_cycle(self._target, drafter, self.k))
        return Engine(self._target, drafter, cycle, max(waiting, 1), pages=self._target.pages)

    def _check(self, receipt: Receipt) -> None:
        """Raise UserError for what this model has no ids or no room for."""
        vocab, rules = self._target.vocab, receipt.constraint
        named = [receipt.prompt.ids, receipt.answer.ids, receipt.limits.stop_ids]
        named.append(tuple(dict(receipt.sampling.logit_bias)))
        if rules is not None:
            named += [rules.allowed or (), rules.stop_ids, *rules.bad_words]
            if rules.budget is not None:
                named.append((rules.budget.open_id, rules.budget.close_id))
        largest = max(max(ids, default=0) for ids in named)
        if largest >= vocab:
            raise UserError(f"it names token {largest}, but this model's ids are 0 to {vocab - 1}")
        length = len(receipt.prompt.ids) + len(receipt.answer.ids)
        if length > self._target.max_len:
            raise UserError(
                f"prompt and answer have {length} tokens, but the context is {self._target.max_len}"
            )

    def _sequence(self, receipt: Receipt) -> Sequence:
        prompt = list(receipt.prompt.ids)
        claim = PredictedText(receipt.answer.ids, sought=False)
        return Sequence(
            prompt,
            receipt.sampling_of(),
            max_tokens=_most(receipt),
            stop_ids=frozenset(receipt.limits.stop_ids),
            constraint=self._constraint(receipt),
            prediction=Prediction(claim, len(prompt)),
            reuse=None,
        )

    def _constraint(self, receipt: Receipt) -> Constraint | None:
        """Its grammar is tried first in a process that may die, as any request's is."""
        rules = receipt.constraint
        return None if rules is None else unpacked(rules.model_dump(), self._vocabulary)


def _most(receipt: Receipt) -> int:
    """Tokens of the replay: not one beyond the claim, unless it ended by its grammar's cost, which
    shows when the next token is to be chosen."""
    limit, claimed = receipt.limits.max_tokens, len(receipt.answer.ids)
    guided = receipt.constraint is not None and receipt.constraint.grammar is not None
    return min(limit, claimed + (guided and receipt.answer.finish == "length"))


def _false_end(row: Row) -> Verdict | None:
    """The verdict on an answer that does not end where and why it is claimed to; None if it
    does."""
    claim, end = row.receipt.answer, row.finish or GOES_ON
    right = f"{end} after {row.ended_at}" if row.finish is not None else GOES_ON
    if row.ended_at < len(claim.ids) or (claim.finish is not None and claim.finish != end):
        claimed = f"{claim.finish or GOES_ON} after {len(claim.ids)}"
        return Verdict("ends otherwise", at=row.ended_at, claimed=claimed, right=right)
    return None


def _false_logprob(row: Row) -> Verdict | None:
    if row.receipt.logprobs is None:
        return None
    claimed = row.receipt.chosen_logprobs()
    right = np.array([each.logprob for each in row.logprobs], "<f4")
    unlike = np.flatnonzero(claimed.view("<u4") != right.view("<u4"))
    if not len(unlike):
        return None
    at = int(unlike[0])
    return Verdict("log-probability differs", at=at, claimed=f"{claimed[at]}", right=f"{right[at]}")


def _false_commitment(row: Row) -> Verdict | None:
    if row.receipt.commitments is None:
        return None
    right = dict(commitments_of(row.logprobs).digests())
    for name, claimed in row.receipt.commitments.digests():
        pairs = enumerate(zip(claimed, right[name], strict=True))
        at = next((block for block, (a, b) in pairs if a != b), None)
        if at is not None:
            shown = f"{name} {claimed[at]}"
            return Verdict("commitment differs", at=at, claimed=shown, right=right[name][at])
    return None


def _last_logprob(event: Event, token: int) -> float | None:
    """None where the id could not be chosen, as it is suppressed."""
    if not event.tokens or event.tokens[-1] != token or not event.logprobs:
        return None
    return event.logprobs[-1].logprob
