"""Whether schemas exclude each other, so that `oneOf` is equivalent to `anyOf`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from specdec.constraints.json_values import TYPES, identity, type_of

Schema = dict[str, Any]


def exclusive(schemas: Iterable[Any]) -> bool:
    """Whether it is certain, by their types and listed values, that no value is valid for two of
    them. One pass: there may be thousands."""
    free: set[str] = set()
    """Types of schemas that list no values."""
    listed: set[str] = set()
    taken: set[Hashable] = set()
    for schema in schemas:
        if schema is False:
            continue
        values = _values(schema)
        types = _types(schema, values)
        if values is None:
            if types & (free | listed):
                return False
            free |= types
            continue
        ours = set(map(identity, values))
        if types & free or ours & taken:
            return False
        listed |= types
        taken |= ours
    return True


def _types(schema: Any, values: list[Any] | None) -> set[str]:
    """Types of the values that a schema admits. An integer is a number too."""
    if values is not None:
        found = set(map(type_of, values))
        return found | ({"number"} if "integer" in found else set())
    types = schema.get("type", TYPES) if isinstance(schema, dict) else TYPES
    names = [types] if isinstance(types, str) else types
    if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names):
        return set(TYPES)  # invalid types: the compiler reports them
    found = set(names)
    return found | ({"integer"} if "number" in found else set())


def _values(schema: Any) -> list[Any] | None:
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None
