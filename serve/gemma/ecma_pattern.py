"""JSON schema's regular expressions (ECMA-262) as llguidance's, which match whole strings."""

from __future__ import annotations

import re
from collections.abc import Callable

from specdec.core.errors import UserError

ANYTHING = "(?s:.*)"
# What the classes mean in ECMA-262: digits and words are ASCII, blanks are all of Unicode's.
BLANKS = r"\t-\r\x20\xa0\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}"
CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": BLANKS}
NOT_A_LINE_END = r"[^\n\r\x{2028}\x{2029}]"
CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
CODE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")
PROPERTY = re.compile(r"[pP]\{[A-Za-z_]+(=[A-Za-z_]+)?\}")
REPEAT = re.compile(r"(\*|\+|\?|\{\d+(,\d*)?\})\??")
UNCLEAR = re.compile(r"\{,\d+\}")  # itself in ECMA-262, a repetition for Python's validators
RANGE = re.compile(r"-(?!\]|\Z|\\[dDwWsSpP])")  # between two characters; else it is itself
GROUP = re.compile(r"\((\?:|\?<[A-Za-z_]\w*>|(?!\?))")


def whole_regex(pattern: str) -> str:
    """What matches the strings in which `pattern` is found. Raises UserError, with the reason."""
    return _Pattern(pattern).translated()


class _Pattern:
    def __init__(self, pattern: str) -> None:
        self._text, self._at = pattern, 0

    def translated(self) -> str:
        found = "|".join(self._alternatives(self._outermost))
        if self._at < len(self._text):
            raise UserError("a bracket is closed that was not opened")
        return f"({found})"

    def _alternatives(self, one: Callable[[], str]) -> list[str]:
        found = [one()]
        while self._takes("|"):
            found.append(one())
        return found

    def _outermost(self) -> str:
        """An alternative that no bracket encloses: only here an anchor may stand."""
        before = "" if self._takes("^") else ANYTHING
        body = self._sequence()
        after = "" if self._takes("$") else ANYTHING
        return before + body + after

    def _sequence(self) -> str:
        found = ""
        while self._at < len(self._text) and self._text[self._at] not in "|)$":
            found += self._piece()
            if repeat := self._match(REPEAT):
                found += repeat[1]
        return found

    def _piece(self) -> str:
        if self._match(GROUP):
            inner = "|".join(self._alternatives(self._sequence))
            if not self._takes(")"):
                raise UserError("a bracket is not closed, or an anchor stands inside it")
            return f"({inner})"
        if self._takes("["):
            return self._class()
        if self._takes("."):
            return NOT_A_LINE_END
        if self._takes("\\"):
            return self._escape(inside=False)
        char = self._text[self._at]
        if char in "(^*+?" or self._match(UNCLEAR):
            raise UserError(f"{char!r} at {self._at} is not supported")
        self._at += 1
        return _code(ord(char))

    def _class(self) -> str:
        negated, items = self._takes("^"), ""
        while not self._takes("]"):
            if self._at >= len(self._text):
                raise UserError("a class is not closed")
            item, single = self._member()
            if single and self._match(RANGE):
                end, single = self._member()
                if not single:
                    raise UserError("a range in a class has no end")
                item += "-" + end
            items += item
        if not items:
            raise UserError("a class is empty")
        return f"[{'^' if negated else ''}{items}]"

    def _member(self) -> tuple[str, bool]:
        """A character of a class, or a class in it; and whether it is one character."""
        if self._takes("\\"):
            many = self._text[self._at : self._at + 1] in tuple("dDwWsSpP")
            return self._escape(inside=True), not many
        char = self._text[self._at]
        self._at += 1
        return _code(ord(char)), True

    def _escape(self, inside: bool) -> str:
        if code := self._match(CODE):
            point = int(code[1] or code[2] or code[3], 16)
            if point > 0x10FFFF or 0xD800 <= point < 0xE000:
                raise UserError(f"'\\{code[0]}' is no character")
            return _code(point)
        if named := self._match(PROPERTY):
            return "\\" + named[0]
        char = self._text[self._at : self._at + 1]
        self._at += 1
        if char.lower() in CLASSES and char:
            negated = "^" if char.isupper() else ""
            # A class may stand in a class.
            plain = inside and not negated
            return CLASSES[char] if plain else f"[{negated}{CLASSES[char.lower()]}]"
        if char in CONTROLS and char:
            return _code(CONTROLS[char])
        if inside and char == "b":
            return _code(8)
        if not char or char.isalnum():
            raise UserError(f"'\\{char}' is not supported")
        return _code(ord(char))

    def _takes(self, char: str) -> bool:
        found = self._text.startswith(char, self._at)
        self._at += found
        return found

    def _match(self, what: re.Pattern[str]) -> re.Match[str] | None:
        found = what.match(self._text, self._at)
        if found:
            self._at = found.end()
        return found


def _code(point: int) -> str:
    """One character, in a form that means itself everywhere."""
    char = chr(point)
    return char if char.isascii() and char.isalnum() else f"\\x{{{point:x}}}"
