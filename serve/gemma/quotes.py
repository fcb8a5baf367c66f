"""Strings in JSON's or Python's quotes, which Gemma sometimes writes in place of its own."""

from __future__ import annotations

import json
import re

MARKS = "\"'"
ESCAPE = re.compile(r"\\(u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|.)", re.DOTALL)
CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}


class Quoted:
    """Text after a quote mark, held until it is clear whether the mark opens a string: it does if a
    second mark is followed by one of the characters in `ends`, with only blanks between."""

    def __init__(self, mark: str, ends: str) -> None:
        self.mark = mark
        self._ends = ends
        self._text: list[str] = []  # without the first quote
        self._pair: int | None = None  # where a quote stands that only blanks have followed
        self._escaped = False

    @property
    def paired(self) -> bool:
        """Whether the last mark may be the closing one: only blanks have followed it."""
        return self._pair is not None

    @property
    def written(self) -> str:
        """The text as it was written, with the opening mark."""
        return self.mark + "".join(self._text)

    @property
    def text(self) -> str:
        """The text between the quotes, unescaped."""
        return _unescaped("".join(self._text[: self._pair]))

    def add(self, c: str) -> bool:
        """Add a character; True if it proves that the marks enclose a string. It is then not
        added."""
        if self._pair is not None and not c.isspace():
            if c in self._ends:
                return True
            self._pair = None
        if self._escaped:
            self._escaped = False
        elif c == "\\":
            self._escaped = True
        elif c == self.mark:
            self._pair = len(self._text)
        self._text.append(c)
        return False


def _unescaped(text: str) -> str:
    try:
        read = json.loads(f'"{text}"', strict=False)
    except ValueError:
        read = ESCAPE.sub(_character, text)
    # Two escapes may be the surrogates of one character; a lone surrogate is invalid.
    return read.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _character(found: re.Match[str]) -> str:
    code = found[1]
    if len(code) > 1:
        return chr(int(code[1:], 16))
    if code in MARKS or code in "\\/":
        return code
    return CONTROLS.get(code, found[0])
