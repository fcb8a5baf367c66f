"""JSON values as schemas compare them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
_KINDS = {str: "string", bool: "boolean", type(None): "null", list: "array", dict: "object"}


def type_of(value: Any) -> str:
    """The narrowest of TYPES."""
    if type(value) in _KINDS:
        return _KINDS[type(value)]
    return "integer" if isinstance(value, int) or value.is_integer() else "number"


def identity(value: Any) -> Hashable:
    """Equal for values that JSON holds to be equal: 1 is 1.0 and is not true."""
    if isinstance(value, list):
        return "array", tuple(map(identity, value))
    if isinstance(value, dict):
        return "object", frozenset((key, identity(each)) for key, each in value.items())
    return isinstance(value, bool), value


def same(one: Any, other: Any) -> bool:
    return identity(one) == identity(other)
