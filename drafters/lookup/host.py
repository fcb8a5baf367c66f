"""The device loops' lookup, on the host: it guesses the tokens that followed the longest suffix of
the text at its last occurrence. And what the host loop's drafters share with it."""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from dataclasses import dataclass, field

import numpy as np

from specdec.core.types import NO_GUESS, Array, Proposal, Sequence, Step

AT_ONCE = 2048
"""Tokens of a text that an index in Python takes up in one call: nobody decodes meanwhile. Behind a
long prompt that the prefix cache restored, it says nothing for some cycles."""
SEEN = 1 << 14
"""Tokens of the text's end that the twin searches, anew in each cycle."""


def continuation(tokens: Seqs[int] | np.ndarray, follow: int, k: int) -> list[int]:
    """The k tokens from `follow` on; past the end of the text the match repeats with its period.
    NO_GUESS at pictures' places, of which no copy could be right."""
    period = len(tokens) - follow
    return [max(int(tokens[follow + i % period]), NO_GUESS) for i in range(k)]


def longest_suffix(text: np.ndarray, shortest: int, longest: int) -> tuple[int, int]:
    """The longest suffix of text [S], of `shortest` to `longest` tokens, that occurred before:
    where it was last followed by a token, and its length; (0, 0) where there is none."""
    found, places = (0, 0), np.arange(1, len(text))
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

    def read(self, tokens: list[int]) -> np.ndarray:
        """-> the text's end."""
        if len(tokens) > len(self.tokens):
            self.tokens = np.resize(self.tokens, 2 * len(tokens))
        self.tokens[self.size : len(tokens)] = tokens[self.size :]
        self.size = len(tokens)
        return self.tokens[max(0, self.size - SEEN) : self.size]


class LookupTwin:
    """A `Drafter` with the same guesses as the device's step."""

    def __init__(self, shortest: int, longest: int) -> None:
        """Suffixes of so many tokens."""
        self._lengths = shortest, longest
        self._texts: dict[int, _Text] = {}

    def reset(self, seq: Sequence) -> None:
        self._texts[seq.slot] = _Text()

    def prefill(self, seq: Sequence, start: int, stop: int, step: Step) -> None:
        pass  # `propose` reads the engine's token history, there is nothing else to learn

    def propose(self, seqs: Seqs[Sequence], k: int) -> Proposal:
        draft = np.full((len(seqs), k), NO_GUESS, np.int32)
        for b, seq in enumerate(seqs):
            own = self._texts[seq.slot]
            text = own.read(seq.tokens)
            follow, own.matched = longest_suffix(text, *self._lengths)
            if own.matched:
                draft[b] = continuation(text, follow, k)
        return Proposal(draft)

    def observe(self, seqs: Seqs[Sequence], step: Step, accepted: Array) -> None:
        pass

    def matched(self, seq: Sequence) -> int:
        """Length of the suffix that the last guess followed from, 0 where none was found."""
        return self._texts[seq.slot].matched
