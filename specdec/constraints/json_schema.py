"""A JSON schema as llguidance compiles it: nothing that changes what is valid is ever ignored.

Some keywords that it lacks can be said by others. What can't be said is refused.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import combinations
from typing import Any

from llguidance import LLMatcher

from specdec.constraints.exclusive import exclusive
from specdec.constraints.grammar import Part, check, composed, part_of
from specdec.core.errors import UserError

BLANKS = r"[\x20\x0A\x0D\x09]{1,32}"
"""White space between a document's parts. Bounded: a model that has lost its way would otherwise
print blanks until its last token."""
OPTIONS: Any = {
    "whitespace_flexible": True,
    "whitespace_pattern": BLANKS,
    "coerce_one_of": False,
    "lenient": False,
}
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
        said = json.dumps(Prepared({} if schema is True else schema).schema)
        grammar = LLMatcher.grammar_from_json_schema(said, overrides=OPTIONS)
    except RecursionError:
        raise UserError("this JSON schema is nested too deeply") from None
    check(grammar, "this JSON schema can't be followed exactly")
    return part_of(grammar)


def json_grammar(schema: dict[str, Any] | bool) -> str:
    """`json_part` as a text's whole grammar."""
    return composed("start: @json\n", {"json": json_part(schema)})


class Prepared:
    """A schema in words that llguidance knows, as far as there are any."""

    def __init__(self, schema: Any) -> None:
        self._root = schema
        self._moved = _has_other_bases(schema)
        self.schema = self._said(schema)

    def _said(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        kept: dict[str, Any] = {}
        for name, value in schema.items():
            if name == "x-guidance" or (name == "format" and not _known_format(value)):
                continue
            if name in _MAPS and isinstance(value, dict):
                value = {key: self._said(part) for key, part in value.items()}
            elif name in _LISTS and isinstance(value, list):
                value = [self._said(part) for part in value]
            elif name in _ONE:
                value = self._said(value)
            kept[name] = value
        return _without_dependencies(self._without_one_of(kept))

    def _without_one_of(self, schema: dict[str, Any]) -> dict[str, Any]:
        """`oneOf` as `anyOf`, where that is the same."""
        parts = schema.get("oneOf")
        if not isinstance(parts, list) or len(parts) < 2:
            return schema
        base = {key: value for key, value in schema.items() if key not in ("oneOf", "anyOf")}
        resolved = [self._with_base(base, part) for part in parts]
        if all(exclusive(a, b, lambda part: part) for a, b in combinations(resolved, 2)):
            return _renamed(schema, parts)
        if all(isinstance(part, dict) and _only_required(part) for part in parts):
            return _renamed(schema, _exactly_one([part["required"][0] for part in parts]))
        return schema

    def _with_base(self, base: dict[str, Any], part: Any) -> Any:
        """An alternative with what is said beside all of them, for comparing only."""
        part = self._resolved(part)
        if not isinstance(part, dict):
            return part
        merged = {**base, **part}
        if isinstance(base.get("properties"), dict) and isinstance(part.get("properties"), dict):
            merged["properties"] = {**base["properties"], **part["properties"]}
        both = (*base.get("required", ()), *part.get("required", ()))
        return {**merged, "required": both} if both else merged

    def _resolved(self, part: Any) -> Any:
        """What a `$ref` within this document points at; the part itself where that isn't plain."""
        for _ in range(8):
            if not isinstance(part, dict) or "$ref" not in part or self._moved:
                return part
            found = _at(self._root, part["$ref"])
            if found is None:
                return part
            part = found
        return part


def _renamed(schema: dict[str, Any], alternatives: list[Any]) -> dict[str, Any]:
    rest = {key: value for key, value in schema.items() if key != "oneOf"}
    if "anyOf" not in rest:
        return {**rest, "anyOf": alternatives}
    return {**rest, "allOf": [*rest.get("allOf", ()), {"anyOf": alternatives}]}


def _only_required(part: dict[str, Any]) -> bool:
    names = part.get("required")
    return part.keys() == {"required"} and isinstance(names, list) and len(names) == 1


def _exactly_one(names: list[str]) -> list[dict[str, Any]]:
    """Objects that have just one of these properties. What is no object would satisfy all."""
    return [
        {
            "type": "object",
            "required": [name],
            "properties": {other: False for other in names if other != name},
        }
        for name in names
    ]


def _without_dependencies(schema: dict[str, Any]) -> dict[str, Any]:
    """Properties that need others: either it isn't there, or the others are."""
    rules: list[dict[str, Any]] = []
    rest = dict(schema)
    for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
        given = schema.get(keyword)
        if not isinstance(given, dict) or schema.get("type") != "object":
            continue
        if not all(isinstance(need, (list, dict)) for need in given.values()):
            continue
        rest.pop(keyword)
        for name, need in given.items():
            then = {"required": [name, *need]} if isinstance(need, list) else need
            there = {"required": [name]} if isinstance(need, dict) else {}
            rules.append({"anyOf": [{"properties": {name: False}}, {**there, **then}]})
    return {**rest, "allOf": [*rest.get("allOf", ()), *rules]} if rules else schema


def _has_other_bases(schema: Any) -> bool:
    """Whether a part has an `$id` of its own, to which references are relative."""
    if isinstance(schema, dict):
        inner = [value for value in schema.values() if isinstance(value, (dict, list))]
        return any(isinstance(v, dict) and "$id" in v or _has_other_bases(v) for v in inner)
    return isinstance(schema, list) and any(
        isinstance(v, dict) and "$id" in v or _has_other_bases(v) for v in schema
    )


def _at(root: Any, reference: Any) -> Any:
    """What `#/a/b` is, None where that is nothing."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = root
    for name in filter(None, reference[1:].split("/")):
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or name not in found:
            return None
        found = found[name]
    return found


@cache
def _known_format(name: Any) -> bool:
    if not isinstance(name, str):
        return True  # no annotation but a mistake: the compiler says so
    probe = LLMatcher.grammar_from_json_schema({"type": "string", "format": name})
    return not LLMatcher.validate_grammar(probe)
