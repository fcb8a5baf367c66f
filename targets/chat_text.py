"""Chat texts and control tokens: what people write stays text, only the template writes control
tokens.

A control token inside a content is broken by a mark before the template sees it. The rendered text
is then cut at the marks, and its pieces are encoded one by one: in none of them the tokenizer can
find what was broken. Where nothing was broken, the text is encoded whole, as ever.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from specdec.core.errors import UserError

MARKS = range(0xE000, 0xF8FF)
"""Private-use characters: the first ones that occur in no text are marks."""


class ControlTokens:
    """The control tokens of one vocabulary, as texts."""

    def __init__(self, tokens: Iterable[str]) -> None:
        known = sorted(tokens, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, known)) or r"(?!)")
        self._beginnings = {token[:i] for token in known for i in range(1, len(token))}
        self._longest = max(map(len, known), default=1)

    def marks_for(self, values: Any, count: int) -> list[str]:
        """Characters that occur in none of these texts. Raises UserError if too few are left."""
        used = set().union(*map(set, _texts(values)))
        marks = list(islice((chr(code) for code in MARKS if chr(code) not in used), count))
        if len(marks) < count:
            raise UserError("the messages use every private-use character: leave some out")
        return marks

    def broken(self, value: Any, mark: str) -> Any:
        """Texts, or lists and mappings of them, with a mark inside each control token, and behind
        what may begin one that the next text ends."""
        if isinstance(value, str):
            return self._broken_text(value, mark)
        if isinstance(value, Mapping):
            return {self.broken(k, mark): self.broken(v, mark) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.broken(item, mark) for item in value]
        return value

    def _broken_text(self, text: str, mark: str) -> str:
        text = self._any.sub(lambda found: found[0][0] + mark + found[0][1:], text)
        bare = text.rstrip()
        tails = (bare[-n:] for n in range(1, min(self._longest, len(bare) + 1)))
        if any(tail in self._beginnings for tail in tails):
            return bare + mark + text[len(bare) :]
        return text

    def pieces(self, text: str, mark: str) -> list[str]:
        """`text` without its marks, cut where one keeps a control token apart."""
        first, *others = text.split(mark)
        pieces = [first]
        for part in others:
            if self._meet(pieces[-1], part):
                pieces.append(part)
            else:
                pieces[-1] += part
        return pieces

    def _meet(self, left: str, right: str) -> bool:
        """Whether a control token would begin in one and end in the other."""
        tail = left[-(self._longest - 1) :] if self._longest > 1 else ""
        both = tail + right[: self._longest - 1]
        return any(m.start() < len(tail) < m.end() for m in self._any.finditer(both))


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)
