"""Compiles a JSON schema by llguidance. No keyword that affects validity is ever ignored.

Some keywords that llguidance lacks are expressed by others; a schema with any other is refused.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

from specdec.constraints.exclusive import exclusive
from specdec.constraints.grammar import Part, check, composed, part_of
from specdec.core.errors import UserError

BLANKS = r"[\x20\x0A\x0D\x09]{1,32}"
"""White space between a document's parts. It is bounded, as a degenerate answer could otherwise be
blanks until max_tokens."""
OPTIONS: Any = {
    "whitespace_flexible": True,
    "whitespace_pattern": BLANKS,
    "coerce_one_of": False,
    "lenient": False,
}
LARGEST = 2**63 - 2
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAY = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
_DATE = f"^({_YEAR}-{_DAY}|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
DATES = {"date": _DATE + "$", "date-time": _DATE}
"""Patterns of real dates; llguidance's own formats admit a year 0 and 29 February in every year."""
_ONE = ("not", "if", "then", "else", "contains", "propertyNames", "additionalProperties")
_ONE += ("unevaluatedProperties", "unevaluatedItems", "additionalItems", "items")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def json_part(schema: dict[str, Any] | bool) -> Part:
    """The grammar of the documents that are valid for `schema`. An unknown `format` is an
    annotation. Raises UserError where a keyword can't be honoured exactly."""
    if schema is False:
        raise UserError("this JSON schema can't be followed exactly: nothing is valid for false")
    try:
        text = json.dumps(Prepared({} if schema is True else schema).schema)
        grammar = LLMatcher.grammar_from_json_schema(text, overrides=OPTIONS)
    except RecursionError:
        raise UserError("this JSON schema is nested too deeply") from None
    except ValueError as problem:
        raise UserError(f"this JSON schema can't be read: {problem}") from None
    check(grammar, "this JSON schema can't be followed exactly")
    return part_of(grammar)


def json_grammar(schema: dict[str, Any] | bool) -> str:
    """`json_part` as a text's whole grammar."""
    return composed("start: @json\n", {"json": json_part(schema)})


class Prepared:
    """A schema rewritten with keywords that llguidance supports, as far as possible."""

    def __init__(self, schema: Any) -> None:
        self._root = schema
        self._moved = _has_other_bases(schema)
        self.schema = self._prepared(schema)

    def _prepared(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        _check_whole_numbers([schema.get("const"), schema.get("enum")])
        kept: dict[str, Any] = {}
        for name, value in schema.items():
            unknown = name == "format" and isinstance(value, str) and not _known_format(value)
            if name == "x-guidance" or unknown:
                continue
            if name in _MAPS and isinstance(value, dict):
                value = {key: self._prepared(part) for key, part in value.items()}
            elif name in _LISTS and isinstance(value, list):
                value = [self._prepared(part) for part in value]
            elif name in _ONE:
                value = self._prepared(value)
            kept[name] = value
        return _with_real_dates(self._without_one_of(kept))

    def _without_one_of(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The schema with `oneOf` replaced by `anyOf` if that is equivalent."""
        parts = schema.get("oneOf")
        if not isinstance(parts, list) or "anyOf" in schema:
            return schema
        resolved = list(map(self._resolved, parts))
        if not exclusive(resolved):
            return schema
        return {("anyOf" if key == "oneOf" else key): value for key, value in schema.items()}

    def _resolved(self, part: Any) -> Any:
        """The schema that a `$ref` within this document points at; the part itself if it has none
        or the reference can't be followed simply."""
        for _ in range(8):
            if not isinstance(part, dict) or "$ref" not in part or self._moved:
                return part
            found = _at(self._root, part["$ref"])
            if found is None:
                return part
            part = found
        return part


def _check_whole_numbers(value: Any) -> None:
    """llguidance 1.9 recurses until it crashes on the smallest whole number of 64 bits."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            _check_whole_numbers(item)
    elif isinstance(value, int) and abs(value) > LARGEST:
        raise UserError(f"this JSON schema can't be followed exactly: {value} has over 63 bits")


def _with_real_dates(schema: dict[str, Any]) -> dict[str, Any]:
    form = schema.get("format")
    pattern = DATES.get(form) if isinstance(form, str) else None
    others = schema.get("allOf", [])
    if pattern is None or not isinstance(others, list):
        return schema
    return {**schema, "allOf": [*others, {"pattern": pattern}]}


def _has_other_bases(schema: Any) -> bool:
    """Whether a part has an `$id` of its own, to which references are relative."""
    if isinstance(schema, dict):
        inner = [value for value in schema.values() if isinstance(value, (dict, list))]
        return any(isinstance(v, dict) and "$id" in v or _has_other_bases(v) for v in inner)
    return isinstance(schema, list) and any(
        isinstance(v, dict) and "$id" in v or _has_other_bases(v) for v in schema
    )


def _at(root: Any, reference: Any) -> Any:
    """The value at a reference such as `#/a/b`, None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = root
    for name in filter(None, reference[1:].split("/")):
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or name not in found:
            return None
        found = found[name]
    return found


@lru_cache(256)  # clients name them
def _known_format(name: str) -> bool:
    probe = LLMatcher.grammar_from_json_schema({"type": "string", "format": name})
    return not LLMatcher.validate_grammar(probe)
