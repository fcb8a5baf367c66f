"""Suffix lookup: what followed where the longest suffix of the text occurred before?

Prompt lookup tries suffixes of a few lengths; here a suffix automaton finds the longest of any
length, at a cost per token that does not grow with the text. (Blumer et al. 1985, "The smallest
automaton recognizing the subwords of a text"; Oliaro et al. 2024, arXiv 2411.04975.)
"""

from __future__ import annotations

from collections.abc import Sequence as Seqs

import numpy as np

from specdec.core.errors import UserError
from specdec.core.types import NO_GUESS, Array, Sequence, Step

SHORTEST = 2
"""Below two tokens a match says little: after a lone ` the` or newline anything may follow."""


class SuffixAutomaton:
    """Of a text that grows token by token: the longest suffix that occurred before its end."""

    def __init__(self) -> None:
        self.matched = 0
        """Length of the longest suffix that occurred before."""
        self.follow = 0
        """The position after its first occurrence."""
        self._size = 0
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._end = [-1], [0], [0]
        self._last = self._match = 0

    def append(self, token: int) -> None:
        self._advance(token)  # before the token is known: its own place is no earlier occurrence
        self._extend(token)

    def _advance(self, token: int) -> None:
        state = self._match
        while state and token not in self._next[state]:
            state = self._link[state]
            self.matched = self._length[state]
        if token in self._next[state]:
            state = self._next[state][token]
            self.matched += 1
        self._match, self.follow = state, self._end[state]

    def _extend(self, token: int) -> None:
        self._size += 1
        new = self._state({}, self._size, self._size)
        state, self._last = self._last, new
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state >= 0:
            self._link[new] = self._split(state, token)
        else:
            self._link[new] = 0

    def _split(self, state: int, token: int) -> int:
        """The state of exactly the text of `state` and the token."""
        found = self._next[state][token]
        if self._length[found] == self._length[state] + 1:
            return found
        clone = self._state(dict(self._next[found]), self._length[state] + 1, self._end[found])
        self._link[clone], self._link[found] = self._link[found], clone
        while state >= 0 and self._next[state].get(token) == found:
            self._next[state][token] = clone
            state = self._link[state]
        if self._match == found and self.matched <= self._length[clone]:
            self._match = clone
        return clone

    def _state(self, following: dict[int, int], length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(-1)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1


class SuffixDrafter:
    """Looks at the whole sequence: prompt, earlier chat turns, and what was emitted."""

    def __init__(self, shortest: int = SHORTEST) -> None:
        """shortest: the least suffix that is worth a guess, in tokens. Raises UserError."""
        if shortest < 1:
            raise UserError(f"--suffix-min must be 1 or more, got {shortest}")
        self.shortest = shortest
        self._automata: dict[int, SuffixAutomaton] = {}
        self._read: dict[int, int] = {}

    def reset(self, seq: Sequence) -> None:
        self._automata[seq.slot], self._read[seq.slot] = SuffixAutomaton(), 0

    def prefill(self, seq: Sequence, start: int, stop: int, step: Step) -> None:
        pass  # `propose` reads the engine's token history, there is nothing else to learn

    def propose(self, seqs: Seqs[Sequence], k: int) -> Array:
        draft = np.full((len(seqs), k), NO_GUESS, np.int32)
        for b, seq in enumerate(seqs):
            automaton = self._automata[seq.slot]
            for token in seq.tokens[self._read[seq.slot] :]:
                automaton.append(token)
            self._read[seq.slot] = len(seq.tokens)
            if automaton.matched >= self.shortest:
                period = len(seq.tokens) - automaton.follow  # past the end the match repeats
                draft[b] = [seq.tokens[automaton.follow + i % period] for i in range(k)]
        return draft

    def observe(self, seqs: Seqs[Sequence], step: Step, accepted: Array) -> None:
        pass
