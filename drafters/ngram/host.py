"""Prompt lookup: what followed the last time that the text ended like this?

The longest suffix wins, from n_max tokens down to n_min, and among its earlier occurrences the
most recent one. The index grows with the text, so a cycle costs the same at any context length.
(Saxena 2023, "Prompt Lookup Decoding"; Fu et al. 2024, arXiv 2402.02057, section 3.)
"""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from dataclasses import dataclass, field

import numpy as np

from drafters.lookup.host import AT_ONCE, continuation
from specdec.core.errors import UserError
from specdec.core.types import NO_GUESS, Array, Proposal, Sequence, Step

N_MIN = 2
"""A match of one token predicts little: after a lone ` the` or newline anything may follow."""
N_MAX = 5


@dataclass
class _Index:
    """Where each n-gram of one sequence was last continued: n-gram -> position of what follows."""

    follows: dict[tuple[int, ...], int] = field(default_factory=dict)
    indexed: int = 0
    """Tokens seen so far: every n-gram that ends before `indexed - 1` has a known continuation."""
    matched: int = 0
    """Length of the suffix that was found last."""


class NgramDrafter:
    """Looks at the whole sequence: prompt, earlier chat turns, and what was emitted."""

    def __init__(self, n_min: int = N_MIN, n_max: int = N_MAX) -> None:
        if not 1 <= n_min <= n_max:
            raise UserError(f"n-gram lengths need 1 <= n_min <= n_max, got {n_min} and {n_max}")
        self.n_min, self.n_max = n_min, n_max
        self._indices: dict[int, _Index] = {}

    def reset(self, seq: Sequence) -> None:
        self._indices[seq.slot] = _Index()

    def prefill(self, seq: Sequence, start: int, stop: int, step: Step) -> None:
        self._extend(self._indices[seq.slot], seq.tokens, stop)

    def propose(self, seqs: Seqs[Sequence], k: int) -> Proposal:
        draft = np.full((len(seqs), k), NO_GUESS, np.int32)
        for b, seq in enumerate(seqs):
            follow = self._lookup(seq)
            if follow is not None:
                draft[b] = continuation(seq.tokens, follow, k)
        return Proposal(draft)

    def matched(self, seq: Sequence) -> int:
        """Length of the suffix that the last guess followed from, 0 where none was found."""
        return self._indices[seq.slot].matched

    def observe(self, seqs: Seqs[Sequence], step: Step, accepted: Array) -> None:
        pass

    def _lookup(self, seq: Sequence) -> int | None:
        index = self._indices[seq.slot]
        index.matched = 0
        self._extend(index, seq.tokens, len(seq.tokens))
        if index.indexed < len(seq.tokens):
            return None
        for n in range(min(self.n_max, len(seq.tokens) - 1), self.n_min - 1, -1):
            follow = index.follows.get(tuple(seq.tokens[-n:]))
            if follow is not None:
                index.matched = n
                return follow
        return None

    def _extend(self, index: _Index, tokens: list[int], stop: int) -> None:
        stop = min(stop, index.indexed + AT_ONCE)
        for follow in range(max(index.indexed, 1), stop):
            for n in range(self.n_min, min(self.n_max, follow) + 1):
                index.follows[tuple(tokens[follow - n : follow])] = follow
        index.indexed = max(index.indexed, stop)
