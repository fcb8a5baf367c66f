"""Rules of llguidance's Lark: those of whatever Gemma can write, a list to add others to, and the
forms that their bodies have."""

from __future__ import annotations

import json
from collections.abc import Iterable

from serve.gemma.endless_rules import endless

QUOTE = '<|"|>'
FREE = rf"""
any: string | NUMBER | "true" | "false" | "null" | any_object | any_array
any_object: "{{" ( KEY ":" any ( "," KEY ":" any )* )? "}}"
any_array: "[" ( any ( "," any )* )? "]"
string: {QUOTE} TEXT {QUOTE}
TEXT: /(?s:.*)/
KEY: /[\p{{L}}\p{{N}}_$@.\-]+/
INTEGER: /-?(0|[1-9][0-9]{{0,99}})/
NUMBER: /-?(0|[1-9][0-9]{{0,99}})(\.[0-9]+)?([eE][+-]?[0-9]{{1,2}})?/
"""
"""Rules of whatever Gemma can write, and of values without conditions."""


class LarkRules:
    """Lark rules and terminals that were made so far, whose names begin with `prefix`."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._bodies: dict[str, str] = {}

    def reserve(self) -> str:
        name = f"{self._prefix}_{len(self._bodies)}"
        self._bodies[name] = ""
        return name

    def set(self, name: str, body: str) -> None:
        self._bodies[name] = body

    def add(self, body: str) -> str:
        name = self.reserve()
        self.set(name, body)
        return name

    def terminal(self, body: str) -> str:
        name = f"{self._prefix}_{len(self._bodies)}".upper()
        self.set(name, body)
        return name

    def endless(self) -> set[str]:
        """Rules that no text can end."""
        return endless(self._bodies)

    def __str__(self) -> str:
        return "".join(f"{name}: {body}\n" for name, body in self._bodies.items())


def array(heads: list[str], tail: str, fewest: int) -> str:
    """An array that may end after any item from the `fewest`th on; `tail` follows all heads."""
    body = tail
    for number in range(len(heads), 0, -1):
        if number < len(heads):
            body = f'"," {body}'
            body = body if fewest > number else optional(body)
        body = f"{heads[number - 1]} {body}"
    return f'"[" {body if fewest else optional(body)} "]"'


def more(item: str, fewest: int, most: int | None) -> str:
    """So many items more, each after a comma."""
    if most == 0:
        return ""
    return f'( "," {item} ){{{fewest},{"" if most is None else most}}}'


def optional(body: str) -> str:
    return f"( {body} )?" if body else ""


def either(ways: Iterable[str]) -> str:
    return " | ".join(f"( {way} )" if " " in way else way for way in ways)


def literal(text: str) -> str:
    return json.dumps(text)
