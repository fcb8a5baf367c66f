"""Finds grammar rules that match no finite text, as a schema that requires itself does."""

from __future__ import annotations

import re
from collections.abc import Mapping

TOKEN = re.compile(
    r"""\s*(
        "(?:[^"\\]|\\.)*"       # a literal
      | /(?:[^/\\]|\\.)*/       # a regex
      | <[^>]*>                 # a control token
      | %json\s*\{[^}]*\}       # numbers
      | \{[0-9]*,[0-9]*\}       # how often
      | [A-Za-z_0-9]+           # a rule or a terminal
      | [()|?*&~]
    )""",
    re.VERBOSE,
)


def endless(bodies: Mapping[str, str]) -> set[str]:
    """Names of the rules in `bodies` (name -> body) that match no finite text."""
    tokens = {name: TOKEN.findall(body) for name, body in bodies.items()}
    unended = set(bodies)
    changed = True
    while changed:
        changed = False
        for name in reversed(tokens):  # most rules refer to rules that were added after them
            if name in unended and _Body(tokens[name], unended).ends():
                unended.discard(name)
                changed = True
    return unended


class _Body:
    """One rule's body, read from left to right."""

    def __init__(self, tokens: list[str], unended: set[str]) -> None:
        self._tokens, self._unended, self._at = tokens, unended, 0

    def ends(self) -> bool:
        """Whether any alternative can match a finite text: each of its parts must."""
        found = self._sequence()
        while self._next() == "|":
            self._at += 1
            found |= self._sequence()
        return found

    def _sequence(self) -> bool:
        found = True
        while self._next() not in ("|", ")", ""):
            part = self._part()
            found &= part
        return found

    def _part(self) -> bool:
        token = self._next()
        self._at += 1
        if token == "(":
            found = self.ends()
            self._at += 1  # the bracket that closes it
        else:
            found = token not in self._unended
        if self._next() in ("?", "*") or self._next().startswith(("{0,", "{,")):
            found = True
        if re.match(r"[?*{]", self._next()):
            self._at += 1
        return found

    def _next(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""
