"""The device loops' lookup, on the host: it guesses the tokens that followed the longest suffix of
the text at its last occurrence. And what the host loop's drafters share with it."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence as Seqs
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from specdec.core.types import NO_GUESS, Array, Proposal, Sequence, Step

AT_ONCE = 2048
"""Tokens of a text that an index in Python takes up in one call, between two cycles. Behind a long
prompt that the prefix cache restored, no guess is made for some cycles."""
COMPARED = 1 << 14
"""Latest occurrences of the text's last token that the twin compares: a bound on the work, which
only a text that repeats one token more often meets."""


def continuation(tokens: Seqs[int] | np.ndarray, follow: int, k: int) -> list[int]:
    """The k tokens from `follow` on; past the end of the text the match repeats with its period.
    NO_GUESS at pictures' places, of which no copy could be right."""
    period = len(tokens) - follow
    return [max(int(tokens[follow + i % period]), NO_GUESS) for i in range(k)]


def longest_suffix(
    text: np.ndarray, follows: np.ndarray, shortest: int, longest: int
) -> tuple[int, int]:
    """The longest suffix of text [S], of `shortest` to `longest` tokens, that occurred before:
    where it was last followed by a token, and its length; (0, 0) where there is none. follows:
    what is behind the last token's earlier occurrences, in their order."""
    found, places = (0, 0), follows
    for n in range(1, min(longest, len(text) - 1) + 1):
        places = places[places >= n]
        places = places[text[places - n] == text[-n]]
        if not len(places):
            break
        if n >= shortest:
            found = int(places[-1]), n
    return found


@dataclass
class _Text:
    """One slot's text as an array that grows."""

    tokens: np.ndarray = field(default_factory=lambda: np.empty(1024, np.int32))
    size: int = 0
    matched: int = 0
    """Length of the suffix that was found last."""
    follows: defaultdict[int, array[int]] = field(
        default_factory=lambda: defaultdict(partial(array, "i"))
    )
    """By token, the positions behind it."""

    def read(self, tokens: list[int], stop: int) -> None:
        """Take up the text before `stop`."""
        if stop > len(self.tokens):
            self.tokens = np.resize(self.tokens, 2 * stop)
        news = tokens[self.size : stop]
        self.tokens[self.size : self.size + len(news)] = news
        for position, token in enumerate(news, self.size + 1):
            self.follows[token].append(position)
        self.size += len(news)

    def suffix(self, shortest: int, longest: int) -> tuple[np.ndarray, int]:
        """The text, and where its longest suffix was followed (see `longest_suffix`)."""
        text = self.tokens[: self.size]
        behind = np.frombuffer(self.follows[int(text[-1])], np.int32)
        follow, self.matched = longest_suffix(text, behind[-COMPARED - 1 : -1], shortest, longest)
        return text, follow


class LookupTwin:
    """A `Drafter` with the same guesses as the device's step."""

    def __init__(self, shortest: int, longest: int) -> None:
        """Suffixes of so many tokens."""
        self._lengths = shortest, longest
        self._texts: dict[int, _Text] = {}

    def reset(self, seq: Sequence) -> None:
        self._texts[seq.slot] = _Text()

    def prefill(self, seq: Sequence, start: int, stop: int, step: Step) -> None:
        self._texts[seq.slot].read(seq.tokens, stop)

    def propose(self, seqs: Seqs[Sequence], k: int) -> Proposal:
        draft = np.full((len(seqs), k), NO_GUESS, np.int32)
        for b, seq in enumerate(seqs):
            own = self._texts[seq.slot]
            own.read(seq.tokens, len(seq.tokens))
            text, follow = own.suffix(*self._lengths)
            if own.matched:
                draft[b] = continuation(text, follow, k)
        return Proposal(draft)

    def observe(self, seqs: Seqs[Sequence], step: Step, accepted: Array) -> None:
        pass

    def matched(self, seq: Sequence) -> int:
        """Length of the suffix that the last guess followed from, 0 where none was found."""
        return self._texts[seq.slot].matched
