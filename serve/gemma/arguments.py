"""A call's arguments, from Gemma's syntax to JSON, while they are generated.

Gemma writes `{city:<|"|>Paris<|"|>,days:3,tags:[<|"|>a<|"|>]}`: bare keys, bare numbers and words,
and strings between two control tokens, so that a string may hold anything else.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from enum import Enum, auto

DEEPEST = 100
"""Objects and arrays in each other; a bracket beyond is text. Parsers of JSON have limits too."""

WORDS = {"true": "true", "false": "false"}
NOTHING = ("null", "none", "nil")  # in any case, as vLLM reads them
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
ENDS_IN_DOT = re.compile(r"-?(0|[1-9][0-9]*)\.")


class _At(Enum):
    """What comes next."""

    KEY = auto()
    QUOTED_KEY = auto()
    COLON = auto()
    VALUE = auto()
    STRING = auto()
    COMMA = auto()
    NOTHING = auto()


@dataclass
class _Frame:
    """An object or array that is open."""

    closer: str
    entries: int = 0


class ArgumentsToJson:
    """Translates one object, piece by piece; what its three methods return is its JSON.

    Total: whatever comes, the pieces up to and with `finish` are one JSON object. Where Gemma's
    syntax is broken, it reads on as vLLM's parser does, or loses less. A key that comes twice is
    written twice; parsers take the last.
    """

    def __init__(self) -> None:
        self._at = _At.KEY
        self._held = ""  # a key, or a bare value, that may still grow
        self._open = [_Frame("}")]
        self._begun = False

    @property
    def closed(self) -> bool:
        """Whether the object has ended: nothing that follows belongs to it."""
        return not self._open

    def text(self, text: str) -> str:
        """Take text between two control tokens."""
        if self._at is _At.STRING:
            return _escaped(text)
        if self._at is _At.QUOTED_KEY:
            self._held += text
            return ""
        return self._opening() + "".join(map(self._character, text))

    def quote(self) -> str:
        """Take the control token that begins and ends strings."""
        match self._at:
            case _At.STRING:
                self._at = _At.COMMA
                return '"'
            case _At.QUOTED_KEY:
                self._at = _At.COLON
                return ""
            case _At.NOTHING:
                return ""
            case _At.COMMA:
                self._next_entry()
                return self.quote()
            case _At.VALUE:
                begun = self._begin_value() + '"' + _escaped(self._held)
                self._held, self._at = "", _At.STRING
                return self._opening() + begun
            case _At.KEY | _At.COLON:
                self._held, self._at = "", _At.QUOTED_KEY
                return self._opening()

    def finish(self) -> str:
        """Close what is open."""
        closing = self._opening()
        if self._at is _At.STRING:
            self._at = _At.COMMA
            closing += '"'
        return closing + self._close(len(self._open))

    def _opening(self) -> str:
        begun, self._begun = self._begun, True
        return "" if begun else "{"

    def _character(self, c: str) -> str:
        if self._at is _At.NOTHING:
            return ""
        if c in "}]" and (depth := self._depth_of(c)):
            return self._close(depth)
        if c == ",":
            ended = self._end_entry()
            self._next_entry()
            return ended
        if c.isspace() and not self._held:
            return ""
        if self._at is _At.COMMA:  # the comma was forgotten
            self._next_entry()
        if self._at is _At.VALUE:
            return self._of_value(c)
        return self._of_key(c)

    def _of_key(self, c: str) -> str:
        if c == ":":
            return self._key()
        if self._at is _At.KEY:
            self._held += c
        return ""

    def _of_value(self, c: str) -> str:
        if c in "{[" and not self._held and len(self._open) < DEEPEST:
            begun = self._begin_value() + c
            self._open.append(_Frame("}" if c == "{" else "]"))
            self._next_entry()
            return begun
        self._held += c
        return ""

    def _key(self) -> str:
        key = self._held.strip() if self._at is _At.KEY else self._held
        comma = self._count()
        self._held, self._at = "", _At.VALUE
        return f"{comma}{_string(key)}:"

    def _begin_value(self) -> str:
        # An object's entry was counted, and its comma written, with its key.
        return self._count() if self._open[-1].closer == "]" else ""

    def _count(self) -> str:
        self._open[-1].entries += 1
        return "," if self._open[-1].entries > 1 else ""

    def _next_entry(self) -> None:
        self._held = ""
        self._at = _At.KEY if self._open[-1].closer == "}" else _At.VALUE

    def _end_entry(self) -> str:
        """The bare value that ends here, or the one that a key waited for in vain."""
        held, self._held = self._held.strip(), ""
        waiting, self._at = self._at is _At.VALUE, _At.COMMA
        in_object = self._open[-1].closer == "}"
        if not waiting or not (held or in_object):
            return ""  # a value that ended before, a key without a colon, a comma too many
        return self._begin_value() + _bare(held)

    def _depth_of(self, closer: str) -> int:
        """How many frames `closer` ends: up to the innermost of its kind, 0 if there is none."""
        for depth, frame in enumerate(reversed(self._open), start=1):
            if frame.closer == closer:
                return depth
        return 0

    def _close(self, depth: int) -> str:
        closing = ""
        for _ in range(depth):
            closing += self._end_entry() + self._open.pop().closer
            self._at = _At.COMMA
        if not self._open:
            self._at = _At.NOTHING
        return closing


def _bare(text: str) -> str:
    """JSON of a value without quotes: true, false, null, a number, else text."""
    if text in WORDS:
        return WORDS[text]
    if text.lower() in NOTHING:
        return "null"
    number = text + "0" if ENDS_IN_DOT.fullmatch(text) else text
    # What overflows a double would break the client's parser: it is text.
    if NUMBER.fullmatch(number) and math.isfinite(float(number)):
        return number
    return _string(text)


def _string(text: str) -> str:
    return f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
