"""A JSON schema as llguidance compiles it: nothing that changes what is valid is ever ignored."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from llguidance import LLMatcher

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


def json_grammar(schema: dict[str, Any] | bool) -> str:
    """The grammar of the documents that are valid for `schema`. An unknown `format` is an
    annotation. Raises UserError where a keyword can't be honoured exactly."""
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(prepared(schema)), overrides=OPTIONS)
    complaint = LLMatcher.validate_grammar(grammar)
    if complaint and not complaint.startswith("WARNING"):
        raise UserError(f"this JSON schema can't be followed exactly: {_first_line(complaint)}")
    return grammar


def prepared(schema: Any) -> Any:
    """`schema` without what only annotates it, as far as llguidance would refuse that."""
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "x-guidance" or (name == "format" and not _known_format(value)):
            continue
        if name in _MAPS and isinstance(value, dict):
            value = {key: prepared(part) for key, part in value.items()}
        elif name in _LISTS and isinstance(value, list):
            value = [prepared(part) for part in value]
        elif name in _ONE:
            value = prepared(value)
        kept[name] = value
    return kept


@cache
def _known_format(name: Any) -> bool:
    if not isinstance(name, str):
        return True  # no annotation but a mistake: the compiler says so
    probe = LLMatcher.grammar_from_json_schema({"type": "string", "format": name})
    return not LLMatcher.validate_grammar(probe)


def _first_line(complaint: str) -> str:
    return complaint.strip().splitlines()[0][:300]
