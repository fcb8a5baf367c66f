"""A call's arguments, from Gemma's syntax to JSON, while they are generated.

Gemma writes `{city:<|"|>Paris<|"|>,days:3,tags:[<|"|>a<|"|>]}`: bare keys, bare numbers and words,
and strings between two control tokens, so that a string may hold anything else. Now and then it
writes JSON or Python in their place: `{"city": "Paris"}`, `(city='Paris', days=3)`.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from enum import Enum, auto

from serve.gemma.quotes import MARKS, Quoted

DEEPEST = 100
"""Most nested objects and arrays; a deeper bracket is text, as JSON parsers have limits too."""

WORDS = {"true": "true", "false": "false", "True": "true", "False": "false"}
NOTHING = ("null", "none", "nil")  # in any case, as vLLM reads them
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
PYTHON_KEY = re.compile(r"\s*[A-Za-z_]\w*\s*")
ENDS_IN_DOT = re.compile(r"-?(0|[1-9][0-9]*)\.")


CLOSERS = {"{": "}", "[": "]", "(": ")"}


class _At(Enum):
    """What comes next."""

    KEY = auto()
    QUOTED_KEY = auto()
    COLON = auto()
    VALUE = auto()
    STRING = auto()
    QUOTED = auto()
    COMMA = auto()
    NOTHING = auto()


@dataclass
class _Frame:
    """An object or array that is open."""

    closer: str
    """As Gemma writes it."""
    array: bool = False
    entries: int = 0

    @property
    def end(self) -> str:
        """In JSON."""
        return "]" if self.array else "}"


class ArgumentsToJson:
    """Translates one object, piece by piece; its methods `text`, `quote` and `finish` return JSON.

    For any input, all returned pieces together are one JSON object. Broken syntax is read as vLLM's
    parser reads it, or with less loss. A key that comes twice is written twice; parsers take the
    last.
    """

    def __init__(self, closer: str = "}") -> None:
        """closer: ")" if the arguments are written as a Python call."""
        self._at = _At.KEY
        self._held = ""  # a key, or a bare value, that may still grow
        self._open = [_Frame(closer)]
        self._begun = False
        self._python = closer == ")"
        self._quoted = Quoted("", "")
        self._quotes_key = False  # else a value
        self._unpaired: set[tuple[str, bool]] = set()

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
        return self._opening() + self._characters(text)

    def quote(self) -> str:
        """Take the control token that begins and ends strings."""
        match self._at:
            case _At.QUOTED:
                return self._settled() + self.quote()
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
        closing = self._opening() + self._settled()
        if self._at is _At.STRING:
            self._at = _At.COMMA
            closing += '"'
        return closing + self._close(len(self._open))

    def _opening(self) -> str:
        begun, self._begun = self._begun, True
        return "" if begun else "{"

    def _characters(self, text: str) -> str:
        return "".join(map(self._character, text))

    def _character(self, c: str) -> str:
        if self._at is _At.NOTHING:
            return ""
        if self._at is _At.QUOTED:
            return self._end_quotes() + self._character(c) if self._quoted.add(c) else ""
        if c in "}])" and (depth := self._depth_of(c)):
            return self._close(depth)
        if c == ",":
            ended = self._end_entry()
            self._next_entry()
            return ended
        if c.isspace() and not self._held:
            return ""
        if self._at is _At.COMMA:  # a missing comma
            self._next_entry()
        if self._at is _At.VALUE:
            return self._of_value(c)
        return self._of_key(c)

    def _of_key(self, c: str) -> str:
        if c == ":" or (c == "=" and self._python_key()):
            return self._key()
        if self._begins_quotes(c, key=True):
            return ""
        if self._at is _At.KEY:
            self._held += c
        return ""

    def _python_key(self) -> bool:
        return self._at is _At.COLON or bool(PYTHON_KEY.fullmatch(self._held))

    def _of_value(self, c: str) -> str:
        if c in ("{[(" if self._python else "{[") and not self._held and self._has_room():
            frame = _Frame(CLOSERS[c], array=c != "{")
            begun = self._begin_value() + ("[" if frame.array else "{")
            self._open.append(frame)
            self._next_entry()
            return begun
        if not self._begins_quotes(c, key=False):
            self._held += c
        return ""

    def _has_room(self) -> bool:
        return len(self._open) < DEEPEST

    def _begins_quotes(self, c: str, key: bool) -> bool:
        """Whether `c` may be the opening quote of a string. What follows is held until a closing
        quote decides it."""
        if c not in MARKS or self._held or self._at is _At.COLON or (c, key) in self._unpaired:
            return False
        ends = "".join({",", *(frame.closer for frame in self._open)})
        self._quoted = Quoted(c, ends + ":=" if key else ends)
        self._quotes_key, self._at = key, _At.QUOTED
        return True

    def _end_quotes(self) -> str:
        """Take the held text as a quoted string: a key or a value."""
        if self._quotes_key:
            self._held, self._at = self._quoted.text, _At.COLON
            return ""
        self._at = _At.COMMA
        return self._begin_value() + _string(self._quoted.text)

    def _settled(self) -> str:
        """Decide the held text when no more text follows: a quote without its pair is an ordinary
        character. If one has no pair, no later quote of its kind has one, so the text is read again
        a few times at most."""
        read = ""
        while self._at is _At.QUOTED:
            if self._quoted.paired:
                read += self._end_quotes()
                continue
            self._unpaired.add((self._quoted.mark, self._quotes_key))
            self._at = _At.KEY if self._quotes_key else _At.VALUE
            read += self._characters(self._quoted.written)
        self._unpaired.clear()
        return read

    def _key(self) -> str:
        key = self._held.strip() if self._at is _At.KEY else self._held
        comma = self._count()
        self._held, self._at = "", _At.VALUE
        return f"{comma}{_string(key)}:"

    def _begin_value(self) -> str:
        # An object's entry was counted, and its comma written, with its key.
        return self._count() if self._open[-1].array else ""

    def _count(self) -> str:
        self._open[-1].entries += 1
        return "," if self._open[-1].entries > 1 else ""

    def _next_entry(self) -> None:
        self._held = ""
        self._at = _At.VALUE if self._open[-1].array else _At.KEY

    def _end_entry(self) -> str:
        """JSON of the bare value that ends here; for a key without a value, that of an empty
        one."""
        held, self._held = self._held.strip(), ""
        waiting, self._at = self._at is _At.VALUE, _At.COMMA
        if not waiting or not (held or not self._open[-1].array):
            return ""  # a value that ended before, a key without a colon, a comma too many
        return self._begin_value() + _bare(held)

    def _depth_of(self, closer: str) -> int:
        """How many frames `closer` ends: up to the innermost of its kind, 0 if there is none, or if
        a bare value has opened it."""
        if closer == ")" and (not self._python or self._held.count("(") > self._held.count(")")):
            return 0
        for depth, frame in enumerate(reversed(self._open), start=1):
            if frame.closer == closer:
                return depth
        return 0

    def _close(self, depth: int) -> str:
        closing = ""
        for _ in range(depth):
            closing += self._end_entry() + self._open.pop().end
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
