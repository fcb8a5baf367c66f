"""A suffix automaton that grows token by token: it finds the longest suffix of a text that occurs
in its own text, and the token that came most often after it there.

A state stands for the substrings that end at the same places. (Blumer et al. 1985, "The smallest
automaton recognizing the subwords of a text".)
"""

from __future__ import annotations

from typing import NamedTuple

COUNTED = 32
"""Suffixes of the text, longest first, for which the next token is counted: a bound on the work per
token, also in texts that repeat one thing over and over."""


class Match(NamedTuple):
    """A suffix of some text that occurs in an automaton's text."""

    state: int = 0
    length: int = 0
    """In tokens."""


class SuffixAutomaton:
    """The automaton of one text. The cost per token does not grow with the text."""

    def __init__(self) -> None:
        self.size = 0
        """Tokens that it has read."""
        self._next: list[dict[int, int]] = [{}]
        self._best = [-1]
        """The token that came next most often, the latest of equals; -1 at the text's end."""
        self._often: dict[tuple[int, int], int] = {}
        """(state, token) -> how often it came next, where that is more than once."""
        self._link, self._length = [-1], [0]
        self._last = 0

    def append(self, token: int) -> None:
        """Extend the text by one token."""
        self.size += 1
        new = self._state({}, -1, self._length[self._last] + 1)
        state, self._last = self._last, new
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            self._prefer(state, token)
            state = self._link[state]
        if state < 0:
            self._link[new] = 0
            return
        self._count(state, token)
        self._link[new] = self._exactly(state, token)

    def part(self) -> None:
        """End the text here; tokens that are appended later begin another one."""
        self._last = 0

    def advanced(self, match: Match, token: int) -> Match:
        """The longest suffix once `token` is behind what matched."""
        state, length = match
        while self._link[state] >= 0 and length <= self._length[self._link[state]]:
            state = self._link[state]  # a state that was split since
        while state and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        if token not in self._next[state]:
            return Match()
        return Match(self._next[state][token], length + 1)

    def continuation(self, match: Match, count: int) -> list[int]:
        """The most frequent next tokens, one after the other. At the text's end it goes on where a
        shorter suffix occurred before: a text that repeats itself goes on doing so. Empty without a
        match."""
        state, tokens = match.state, []
        while state and len(tokens) < count:
            best = self._best[state]
            if best < 0:
                state = self._link[state]
                continue
            tokens.append(best)
            state = self._next[state][best]
        return tokens

    def _count(self, state: int, token: int) -> None:
        """`token` came once more, after this suffix and after its shorter ones."""
        for _ in range(COUNTED):
            place = state, token
            self._often[place] = self._often.get(place, 1) + 1
            self._prefer(state, token)
            state = self._link[state]
            if state < 0:
                return

    def _prefer(self, state: int, token: int) -> None:
        often, best = self._often, self._best[state]
        if best < 0 or often.get((state, token), 1) > often.get((state, best), 1):
            self._best[state] = token

    def _exactly(self, state: int, token: int) -> int:
        """The state with the longest text of `state` plus the token as its longest text; it is
        split off if need be."""
        found = self._next[state][token]
        if self._length[found] == self._length[state] + 1:
            return found
        following = dict(self._next[found])
        clone = self._state(following, self._best[found], self._length[state] + 1)
        for after in following:
            times = self._often.get((found, after))
            if times is not None:
                self._often[clone, after] = times
        self._link[clone], self._link[found] = self._link[found], clone
        while state >= 0 and self._next[state].get(token) == found:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _state(self, following: dict[int, int], best: int, length: int) -> int:
        self._next.append(following)
        self._best.append(best)
        self._link.append(-1)
        self._length.append(length)
        return len(self._next) - 1
