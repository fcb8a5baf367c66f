"""Whether schemas exclude each other, so that `oneOf` of them says no more than `anyOf`."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
TYPES = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))


def exclusive(one: Any, other: Any) -> bool:
    """Whether it is certain, by their types and listed values, that no value is valid for both."""
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    if not _types(one) & _types(other):
        return True
    ours, theirs = _values(one), _values(other)
    if ours is None or theirs is None:
        return False
    return not any(_same(a, b) for a in ours for b in theirs)


def _types(schema: Schema) -> frozenset[str]:
    """Types that it admits. An integer is a number too."""
    values = _values(schema)
    if values is not None:
        return frozenset(kind for value in values for kind in _types_of(value))
    given = schema.get("type", TYPES)
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list | frozenset) or not all(isinstance(n, str) for n in names):
        return TYPES  # no types: the compiler says so
    found = set(names)
    return frozenset(found | ({"integer"} if "number" in found else set()))


def _types_of(value: Any) -> tuple[str, ...]:
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, (int, float)):
        return ("number", "integer") if value == int(value) else ("number",)
    kinds = {str: "string", type(None): "null", list: "array", dict: "object"}
    return (kinds[type(value)],)


def _values(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _same(one: Any, other: Any) -> bool:
    """JSON's equality of scalars: 1 is 1.0 and is not true; of others Python's, which may say yes
    too often."""
    if isinstance(one, bool) != isinstance(other, bool):
        return False
    return one == other
