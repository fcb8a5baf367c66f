"""A request's constraint: its grammar and its rules on ids, as masks."""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher

from specdec.constraints.compiled import Compiled
from specdec.constraints.grammar import first_line
from specdec.constraints.recite import Recite
from specdec.constraints.rules import (
    AllowedTokens,
    BadWords,
    LeastTokens,
    Rule,
    ThinkingBudget,
    ThinkingLimit,
)
from specdec.constraints.vocabulary import AT_LIMIT, Vocabulary
from specdec.core.constraint import EVERYTHING, WORD
from specdec.core.errors import UserError
from specdec.core.types import Constraint, Sequence

MEASURED_EVERY = 16
"""Tokens of a text, after which the memory of its grammar's tables is measured again."""
_EXECUTOR = LLExecutor(num_threads=1)


@dataclass(frozen=True)
class TextRules:
    """All rules of a request for its text. Where they contradict each other the grammar wins, so
    that the text is valid in any case."""

    grammar: str | None = None
    """Of the whole text, as llguidance reads it: Lark, or its own JSON form."""
    allowed: tuple[int, ...] | None = None
    """The only token ids that may come."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Runs of token ids that must not come."""
    min_tokens: int = 0
    """How many tokens come before a stop id may."""
    stop_ids: tuple[int, ...] = ()
    """What `min_tokens` keeps away."""
    budget: ThinkingLimit | None = None
    """How long a thought may be."""

    @property
    def empty(self) -> bool:
        """Whether there is no rule at all."""
        return self == TextRules(stop_ids=self.stop_ids)


class TextConstraint:
    """`specdec.core.types.Constraint` of one sequence."""

    def __init__(self, rules: TextRules, vocabulary: Vocabulary) -> None:
        """Raises UserError for a grammar that can't be compiled."""
        self.rules = rules
        self.failure: str | None = None
        self.ends_at: int | None = None
        self._vocabulary = vocabulary
        self._compiled: Compiled | None = None
        self._matcher = None if rules.grammar is None else self._new_matcher()
        self._consumed: list[int] = []
        """Tokens that the matcher has read."""
        self._measured_at = 0
        """Length of `_consumed` when the grammar's tables were last measured."""
        self._others = _others(rules)
        self._stop_ids = frozenset(vocabulary.stop_ids)
        self._read = 0
        self._ended = False
        self._forced: list[int] | None = None
        """Token ids that must follow the text read so far; None until `forced` is called."""

    def masks(self, seq: Sequence, draft: Seqs[int], out: np.ndarray) -> None:
        self._forget_draft()
        self._catch_up(seq)
        if self._matcher is not None and not self._ended:
            self._follow_grammar(self._matcher, draft, out)
        if not self._others:
            return
        rows = out[: len(draft) + 1]
        before = rows.copy()
        for rule in self._others:
            rule.restrict(draft, rows)
        nothing_left = ~rows.any(1)
        rows[nothing_left] = before[nothing_left]

    def forced(self, seq: Sequence) -> list[int]:
        self._catch_up(seq)
        if self._matcher is None or self._ended or self._matcher.is_error():
            return []
        if self._forced is None:
            # of a copy: compute_ff_bytes pushes the bytes into the matcher, and its masks then fail
            # if a control token is among them (llguidance 1.9)
            forced = self._matcher.deep_copy().compute_ff_bytes()
            self._forced = self._vocabulary.tokens_of(forced)
        return self._forced

    def packed(self) -> dict[str, Any]:
        return asdict(self.rules)

    def _catch_up(self, seq: Sequence) -> None:
        """Learn what was emitted since the last time."""
        news = seq.tokens[seq.prompt_len + self._read :]
        self._read += len(news)
        if news:
            self._forced = None
            self._forget_draft()
        for rule in self._others:
            rule.advance(news)
        if self._matcher is None:
            return
        for token in news:
            if self._ended or self.failure is not None:
                return
            if token in self._stop_ids:
                self._ended = True
                return
            self._consumed.append(token)
            if not self._matcher.consume_token(token) and not _at_limit(self._matcher):
                self._fail(self._matcher)
        self._bound_memory()

    def _forget_draft(self) -> None:
        """Where the last draft's text would have ended."""
        if self.ends_at is not None:
            self.ends_at = self.failure = None

    def _bound_memory(self) -> None:
        """Leave tables that have grown too large: they are freed once no text uses them."""
        if len(self._consumed) - self._measured_at < MEASURED_EVERY:
            return
        self._measured_at = len(self._consumed)
        if self._compiled is not None and self._compiled.overgrown() and self.failure is None:
            self._renew()
            self._compiled.settle()

    def _follow_grammar(self, matcher: LLMatcher, draft: Seqs[int], out: np.ndarray) -> None:
        if self.failure is not None:
            return
        place, size = out.ctypes.data, out.shape[1] * out.itemsize
        if draft:
            job = [(matcher, 0, list(draft))]
            _EXECUTOR.unsafe_compute_mask_ptr_with_draft_token(job, place, size, len(out))
        else:
            matcher.unsafe_compute_mask_ptr(place, size)
        if matcher.is_error():
            self._follow_to_limit(draft, out)

    def _follow_to_limit(self, draft: Seqs[int], out: np.ndarray) -> None:
        """The rows one by one, on a matcher that reads the text again: a row that fails, or exceeds
        a limit of the grammar's cost, ends the sequence there, if the text comes to it. Every draft
        finds the limit at the same place, because it counts what the ids before it allow."""
        out[:] = EVERYTHING
        matcher, size = self._renew(), out.shape[1] * out.itemsize
        if matcher is None:
            return
        for j, row in enumerate(out):
            if not matcher.is_error():
                matcher.unsafe_compute_mask_ptr(row.ctypes.data, size)
            if matcher.is_error():
                row[:] = EVERYTHING
                self.ends_at = self._read + j
                if not _at_limit(matcher):
                    self._fail(matcher)
                break
            if j == len(draft) or not _allows(row, draft[j]) or draft[j] in self._stop_ids:
                break
            matcher.consume_token(draft[j])
        self._renew()

    def _renew(self) -> LLMatcher | None:
        """A fresh matcher that has read the text; None, with a failure, where its grammar's tables
        had to be made anew and can't be."""
        try:
            self._matcher = self._again()
        except UserError as refusal:
            self.ends_at, self.failure = None, str(refusal)
            return None
        return self._matcher

    def _again(self) -> LLMatcher:
        """A matcher that has read the text. Raises UserError."""
        matcher = self._new_matcher()
        for token in self._consumed:
            matcher.consume_token(token)
        return matcher if _at_limit(matcher) or not matcher.is_error() else self._again_by_steps()

    def _again_by_steps(self) -> LLMatcher:
        """The same with a mask for each token. Lexing a token counts towards the work that
        llguidance allows for the last mask, so a costly text can't be read without them."""
        matcher = self._new_matcher()
        for token in self._consumed:
            matcher.compute_bitmask()
            matcher.consume_token(token)
        return matcher

    def _new_matcher(self) -> LLMatcher:
        assert self.rules.grammar is not None
        known = self._compiled
        if known is None or known.overgrown():  # once a text is written, no trial holds others up
            known = self._vocabulary.compiled(self.rules.grammar, tried=known is not None)
        self._compiled = known
        return known.copy()

    def _fail(self, matcher: LLMatcher) -> None:
        reason = first_line(matcher.get_error())
        self.failure = f"the grammar can't be followed any further: {reason}"


def _at_limit(matcher: LLMatcher) -> bool:
    """Whether a matcher's error is a limit of `vocabulary.LIMITS`."""
    return matcher.is_error() and any(words in matcher.get_error() for words in AT_LIMIT)


def _allows(row: np.ndarray, token: int) -> bool:
    return bool(row[token // WORD] >> np.uint32(token % WORD) & 1)


def _others(rules: TextRules) -> list[Rule]:
    found: list[Rule] = []
    if rules.allowed is not None:
        found.append(AllowedTokens(rules.allowed))
    if rules.min_tokens:
        found.append(LeastTokens(rules.min_tokens, rules.stop_ids))
    if rules.bad_words:
        found.append(BadWords(rules.bad_words))
    if rules.budget is not None:
        found.append(ThinkingBudget(rules.budget))
    return found


def constraint_of(rules: TextRules, vocabulary: Vocabulary) -> TextConstraint | None:
    """None where nothing is bound. Raises UserError for what can't be enforced."""
    return None if rules.empty else TextConstraint(rules, vocabulary)


def unpacked(packed: dict[str, Any], vocabulary: Vocabulary) -> Constraint:
    """What a constraint's `packed` gave."""
    if "recite" in packed:
        return Recite(packed["recite"])
    fields = dict(packed)
    fields["bad_words"] = tuple(map(tuple, fields["bad_words"]))
    fields["stop_ids"] = tuple(fields["stop_ids"])
    if fields["allowed"] is not None:
        fields["allowed"] = tuple(fields["allowed"])
    if fields["budget"] is not None:
        fields["budget"] = ThinkingLimit(**fields["budget"])
    return TextConstraint(TextRules(**fields), vocabulary)
