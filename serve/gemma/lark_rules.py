"""Rules of llguidance's Lark grammars: rules for any value that Gemma can write, a collection of
generated rules, and functions that write rule bodies."""

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
"""Rules for any value that Gemma can write, used where a schema has no conditions."""


class LarkRules:
    """A growing set of Lark rules and terminals; their names begin with `prefix`."""

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
        """Names of rules that match no finite text."""
        return endless(self._bodies)

    def __str__(self) -> str:
        return "".join(f"{name}: {body}\n" for name, body in self._bodies.items())


def array(heads: list[str], tail: str, fewest: int) -> str:
    """The body of an array: one rule per leading item in `heads`, then `tail`. It may end after any
    item from number `fewest` on."""
    body = tail
    for number in range(len(heads), 0, -1):
        if number < len(heads):
            body = f'"," {body}'
            body = body if fewest > number else optional(body)
        body = f"{heads[number - 1]} {body}"
    return f'"[" {body if fewest else optional(body)} "]"'


def more(item: str, fewest: int, most: int | None) -> str:
    """From `fewest` to `most` further items (None: any number), each after a comma."""
    if most == 0:
        return ""
    return f'( "," {item} ){{{fewest},{"" if most is None else most}}}'


def optional(body: str) -> str:
    return f"( {body} )?" if body else ""


def either(ways: Iterable[str]) -> str:
    return " | ".join(f"( {way} )" if " " in way else way for way in ways)


def literal(text: str) -> str:
    return json.dumps(text)
