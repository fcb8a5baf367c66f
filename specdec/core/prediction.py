"""Predicted output: a text that the answer is expected to repeat for the most part, such as the
file that is to be edited. The guess at each step is what comes next in it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seqs

SURE = 2
"""Tokens before a place that must agree: one alone says little, and the drafter may know better."""
LOOK = 32
"""Places on each side of the last one that are tried where the answer has parted from the text, and
tokens that are compared at each: finding the place again costs the same in any text."""
PATIENCE = 16
"""Tokens after which an answer that has parted from the text is no longer expected back at once."""


class PredictedText:
    """Token ids, and where each occurs. Several answers may be expected to repeat it."""

    def __init__(self, tokens: Seqs[int]) -> None:
        self.tokens = tokens
        self._places: dict[int, list[int]] = {}
        for place, token in enumerate(tokens):
            self._places.setdefault(token, []).append(place)

    def near(self, token: int, place: int) -> Seqs[int]:
        """The places of a token next to this one, at most `LOOK` on each side."""
        places = self._places.get(token, ())
        middle = bisect_left(places, place)
        return places[max(0, middle - LOOK) : middle + LOOK]


class Prediction:
    """A predicted text, and where in it one answer is. It belongs to one sequence, whose `tokens`
    each method is given; what it has read of them stays the same."""

    def __init__(self, predicted: PredictedText, start: int) -> None:
        """start: the position of the answer's first token."""
        self.text, self._predicted = predicted.tokens, predicted
        self._start = self._read = start
        self._next = 0
        self._repeated = bytearray(len(self.text))
        self._followed = -PATIENCE
        """Where the answer last was in the text, `SURE` tokens long; long ago: nowhere yet."""

    @property
    def accepted(self) -> int:
        """Tokens of the text that were found in the answer, in their place, as far as it was
        read."""
        return sum(self._repeated)

    @property
    def rejected(self) -> int:
        """The others."""
        return len(self.text) - self.accepted

    def read(self, tokens: Seqs[int]) -> None:
        """Follow the answer to the end of `tokens`."""
        for at in range(self._read, len(tokens)):
            if not self._expects(tokens[at]):
                self._next = self._found(tokens, at)
            if self._expects(tokens[at]):
                self._repeated[self._next] = 1
                self._next += 1
                if self._agreed(tokens, at, self._next - 1) >= SURE:
                    self._followed = at
        self._read = len(tokens)

    def promising(self, tokens: Seqs[int]) -> bool:
        """Whether it goes on from here, or did a moment ago."""
        return bool(self.guess(tokens, 1)) or len(tokens) - self._followed <= PATIENCE

    def guess(self, tokens: Seqs[int], k: int) -> Seqs[int]:
        """The next k tokens, fewer at the text's end; none where the answer has parted from the
        text, until it is found again."""
        enough = min(SURE, len(tokens) - self._start)
        return self.text[self._next : self._next + k] if self.agreeing(tokens) >= enough else ()

    def agreeing(self, tokens: Seqs[int]) -> int:
        """Tokens at the end of the answer that the text has in a row before its next one; at most
        `LOOK`."""
        self.read(tokens)
        return self._agreed(tokens, len(tokens) - 1, self._next - 1)

    def _expects(self, token: int) -> bool:
        return self._next < len(self.text) and self.text[self._next] == token

    def _found(self, tokens: Seqs[int], at: int) -> int:
        """The place of tokens[at]: of those near the last one that before which the most tokens
        agree, and the nearest of these. The last place itself where there is none."""

        def fit(place: int) -> tuple[int, int]:
            return self._agreed(tokens, at, place), -abs(place - self._next)

        near = self._predicted.near(tokens[at], self._next)
        return max(near, key=fit, default=self._next)

    def _agreed(self, tokens: Seqs[int], at: int, place: int) -> int:
        """Tokens that are the same, from tokens[at] and the text's `place` backwards; at most
        `LOOK`."""
        most = min(LOOK, at - self._start + 1, place + 1)
        pairs = (tokens[at - i] == self.text[place - i] for i in range(most))
        return next((i for i, same in enumerate(pairs) if not same), max(0, most))
