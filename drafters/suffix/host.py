"""Suffix lookup: what came after the longest suffix of the text, where it occurred before?

Prompt lookup tries suffixes of a few lengths; here suffix automata find the longest of any length,
and go on with what came next most often, at a cost per token that does not grow with the text.
(Oliaro et al. 2024, "SuffixDecoding", arXiv 2411.04975.)
"""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from dataclasses import dataclass, field

import numpy as np

from drafters.lookup.host import AT_ONCE
from drafters.suffix.answers import Answers
from drafters.suffix.automaton import Match, SuffixAutomaton
from specdec.core.errors import UserError
from specdec.core.types import NO_GUESS, Array, Proposal, Sequence, Step

SHORTEST = 2
"""A match of one token predicts little: after a lone ` the` or newline anything may follow."""
AHEAD = 64
"""Tokens that are expected beyond the text's end: where an edit ends, it goes on with them."""
RESUMED = 32
"""How many of these a new token is searched in when there is no match."""
CONTEXT = 32
"""Tokens of the text by which its place in newly kept answers is found."""


@dataclass
class _Row:
    """One slot's text and its matches."""

    seq: Sequence
    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    match: Match = Match()
    others: list[tuple[SuffixAutomaton, Match]] = field(default_factory=list)
    """Matches in other requests' answers."""
    expected: list[int] = field(default_factory=list)
    """What was expected to come when last a suffix was found, less what has come since."""
    kept: bool = False

    @property
    def found(self) -> tuple[SuffixAutomaton, Match]:
        """The longest match, of equals that in its own text."""
        return max([(self.own, self.match), *self.others], key=lambda found: found[1].length)


class SuffixDrafter:
    """Searches the whole sequence: prompt, earlier chat turns and emitted tokens; optionally also
    other requests' answers."""

    def __init__(self, shortest: int = SHORTEST, answers: int = 0) -> None:
        """shortest: the shortest suffix from which to guess, in tokens. answers: most tokens of
        ended answers to keep, 0 for none. Raises UserError."""
        if shortest < 1:
            raise UserError(f"--suffix-min must be 1 or more, got {shortest}")
        if answers < 0:
            raise UserError(f"--suffix-answers must be 0 (off) or more tokens, got {answers}")
        self.shortest = shortest
        self._answers = Answers(answers) if answers else None
        self._rows: dict[int, _Row] = {}

    def reset(self, seq: Sequence) -> None:
        self._keep_ended()
        self._rows[seq.slot] = _Row(seq)

    def prefill(self, seq: Sequence, start: int, stop: int, step: Step) -> None:
        self._read(self._rows[seq.slot], stop)

    def propose(self, seqs: Seqs[Sequence], k: int) -> Proposal:
        self._keep_ended()
        draft = np.full((len(seqs), k), NO_GUESS, np.int32)
        for b, seq in enumerate(seqs):
            guesses = self._guess(self._rows[seq.slot])[:k]
            # pictures' places are below NO_GUESS: no copy of one could be right
            draft[b, : len(guesses)] = [max(guess, NO_GUESS) for guess in guesses]
        return Proposal(draft)

    def observe(self, seqs: Seqs[Sequence], step: Step, accepted: Array) -> None:
        pass

    def matched(self, seq: Sequence) -> int:
        """Length of the suffix that the last guess followed from, 0 where none was found."""
        length = self._rows[seq.slot].found[1].length
        return length if length >= self.shortest else 0

    def _guess(self, row: _Row) -> list[int]:
        self._look_at_answers(row)
        self._read(row, len(row.seq.tokens))
        if row.own.size < len(row.seq.tokens):
            return []
        where, match = row.found
        if match.length >= self.shortest:
            row.expected = where.continuation(match, AHEAD)
        return row.expected

    def _read(self, row: _Row, stop: int) -> None:
        for token in row.seq.tokens[row.own.size : min(stop, row.own.size + AT_ONCE)]:
            # before the token is known: its own place is no earlier occurrence
            row.match = row.own.advanced(row.match, token)
            row.own.append(token)
            row.others = [(where, where.advanced(m, token)) for where, m in row.others]
            if token in row.expected[:RESUMED]:
                row.expected = row.expected[row.expected.index(token) + 1 :]

    def _look_at_answers(self, row: _Row) -> None:
        """Find the text's place in answers that were kept since."""
        if self._answers is None or row.seq.reuse is None:
            return
        there = self._answers.of(row.seq.reuse.scope)
        known = {id(where): match for where, match in row.others}
        before = row.seq.tokens[max(0, row.own.size - CONTEXT) : row.own.size]
        row.others = [
            (where, known[id(where)] if id(where) in known else _placed(where, before))
            for where in there
        ]

    def _keep_ended(self) -> None:
        """Answers are kept when they have ended; those of requests that reuse nothing never."""
        if self._answers is None:
            return
        for row in self._rows.values():
            seq = row.seq
            if seq.finish is not None and not row.kept and seq.reuse is not None:
                self._answers.keep(seq.reuse.scope, seq.tokens[seq.prompt_len :])
                row.kept = True


def _placed(where: SuffixAutomaton, tokens: Seqs[int]) -> Match:
    match = Match()
    for token in tokens:
        match = where.advanced(match, token)
    return match
