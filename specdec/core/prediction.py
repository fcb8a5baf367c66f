"""Predicted output: a text that the answer is expected to repeat for the most part, such as the
file that is to be edited. The guess at each step is what comes next in it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seqs

from specdec.core.errors import UserError

MOST_IDS = 2**31
"""Token ids are below it."""
SURE = 2
"""Tokens before a place that must agree with the answer for a guess: one alone is weak evidence,
and the drafter's guess may be better."""
LOOK = 32
"""When the answer has diverged from the text, this many places on each side of the last one are
tried, and this many tokens are compared at each: the search costs the same in any text."""
PATIENCE = 16
"""Tokens after which an answer that has diverged from the text is not expected to return soon."""


class PredictedText:
    """A predicted text's token ids and the places of each id. Several answers may share one."""

    def __init__(self, tokens: Seqs[int], sought: bool = True) -> None:
        """sought: whether an answer that has left the text is looked for in it; else it never
        comes back, and no places are kept. Raises UserError for what can't be a token id: guesses
        are int32."""
        if tokens and not (0 <= min(tokens) and max(tokens) < MOST_IDS):
            raise UserError("a predicted text holds what is no token id: ids are 0 or more")
        self.tokens = tokens
        self._places: dict[int, list[int]] = {}
        for place, token in enumerate(tokens if sought else ()):
            self._places.setdefault(token, []).append(place)

    def near(self, token: int, place: int) -> Seqs[int]:
        """The places of a token next to this one, at most `LOOK` on each side."""
        places = self._places.get(token, ())
        middle = bisect_left(places, place)
        return places[max(0, middle - LOOK) : middle + LOOK]


class Prediction:
    """A predicted text, and the place in it where one answer is. It belongs to one sequence; each
    method gets that sequence's `tokens`, of which the part already read must not change."""

    def __init__(self, predicted: PredictedText, start: int) -> None:
        """start: the position of the answer's first token."""
        self.text, self._predicted = predicted.tokens, predicted
        self._start = self._read = start
        self._next = 0
        self._agreeing = 0
        """Tokens at the answer's end that equal those before `_next`, at most `LOOK`: counted while
        the answer follows the text, compared only where it comes back to it."""
        self._repeated = bytearray(len(self.text))
        self._followed = -PATIENCE
        """Position of the answer's last token that repeated the text with `SURE` agreeing tokens;
        at first far in the past."""

    @property
    def accepted(self) -> int:
        """Tokens of the text that the answer has repeated in place so far."""
        return sum(self._repeated)

    @property
    def rejected(self) -> int:
        """The others."""
        return len(self.text) - self.accepted

    def read(self, tokens: Seqs[int]) -> None:
        """Follow the answer to the end of `tokens`."""
        for at in range(self._read, len(tokens)):
            if self._expects(tokens[at]):
                self._agreeing = min(self._agreeing + 1, LOOK)
            else:
                self._find(tokens, at)
            if self._agreeing:
                self._repeated[self._next] = 1
                self._next += 1
            if self._agreeing >= SURE:
                self._followed = at
        self._read = len(tokens)

    def promising(self, tokens: Seqs[int]) -> bool:
        """Whether there is a guess now, or the answer followed the text in the last PATIENCE
        tokens."""
        return bool(self.guess(tokens, 1)) or len(tokens) - self._followed <= PATIENCE

    def guess(self, tokens: Seqs[int], k: int) -> Seqs[int]:
        """The next k tokens, fewer at the text's end; none while the answer has diverged from the
        text."""
        enough = min(SURE, len(tokens) - self._start)
        return self.text[self._next : self._next + k] if self.agreeing(tokens) >= enough else ()

    def agreeing(self, tokens: Seqs[int]) -> int:
        """Number of tokens at the end of the answer that equal those before the text's current
        place; at most `LOOK`."""
        self.read(tokens)
        return self._agreeing

    def _expects(self, token: int) -> bool:
        return self._next < len(self.text) and self.text[self._next] == token

    def _find(self, tokens: Seqs[int], at: int) -> None:
        """Go to the place of tokens[at] in the text: among its occurrences near the last place the
        one with the most agreeing tokens before it, the nearest of equals. Stay if there is none.
        """

        def fit(place: int) -> tuple[int, int]:
            return self._agreed(tokens, at, place), -abs(place - self._next)

        near = self._predicted.near(tokens[at], self._next)
        self._next = max(near, key=fit, default=self._next)
        self._agreeing = self._agreed(tokens, at, self._next) if near else 0

    def _agreed(self, tokens: Seqs[int], at: int, place: int) -> int:
        """Number of equal tokens backwards from tokens[at] and the text's `place`; at most
        `LOOK`."""
        most = min(LOOK, at - self._start + 1, place + 1)
        pairs = (tokens[at - i] == self.text[place - i] for i in range(most))
        return next((i for i, same in enumerate(pairs) if not same), most)
