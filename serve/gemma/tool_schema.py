"""Grammar rules (llguidance's Lark) for values of a JSON schema, written in Gemma's syntax.

A schema that can't be enforced exactly is refused. Some valid values are never written: keys that a
schema neither names nor gives a schema for, numbers of more than a hundred digits, `1.0` for an
integer.
"""

from __future__ import annotations

import json
from typing import Any

from serve.gemma.ecma_pattern import whole_regex
from serve.gemma.lark_rules import QUOTE, LarkRules, array, either, literal, more, optional
from serve.gemma.schema_parts import (
    ANNOTATIONS,
    KEYWORDS,
    Schema,
    check_shape,
    listed,
    written_types,
)
from serve.gemma.schema_references import References
from specdec.core.errors import UserError

NOT_IN_A_KEY = set(":,{}[]\"'<>|")
# A number with only one bound in its schema gets this as the other: integers up to here are exact
# in a double.
FARTHEST = 2**53 - 1
REFUSED = ("not", "if", "then", "else", "$dynamicRef", "$recursiveRef")
REFUSED_OF_ARRAYS = ("contains", "unevaluatedItems", "additionalItems")
REFUSED_OF_OBJECTS = ("patternProperties", "propertyNames", "dependentRequired")
REFUSED_OF_OBJECTS += ("dependentSchemas", "dependencies")


class SchemaRules:
    """Makes the rules of one root schema."""

    def __init__(self, root: Schema, rules: LarkRules) -> None:
        self._references, self._rules = References(root), rules
        self._known: dict[str, str] = {}  # by the schema's JSON; recursion ends here
        self._places: dict[str, str] = {}  # of rules

    def arguments(self, schema: Schema, where: str) -> str:
        """A rule for values of `schema`. Raises UserError if some rule matches no finite text."""
        rule = self.value(schema, where)
        places = [self._places[name] for name in self._rules.endless() if name in self._places]
        if places:
            raise UserError(f"{min(places, key=len)}: what is required there contains itself")
        return rule

    def value(self, schema: Any, where: str) -> str:
        """A rule for values of `schema`, which is at the path `where` of the root schema.

        Raises UserError with that path and the keyword that can't be enforced.
        """
        if schema is True or schema == {}:
            return "any"
        if schema is False:
            raise UserError(f"{where}: no value is valid there")
        if not isinstance(schema, dict):
            raise UserError(f"{where} must be a schema")
        known = json.dumps(schema, sort_keys=True)
        if known not in self._known:
            self._known[known] = name = self._rules.reserve()
            self._places[name] = where
            self._rules.set(name, self._body(schema, where))
        return self._known[known]

    def _body(self, schema: Schema, where: str) -> str:
        _check_shape(schema, where)
        for keyword in REFUSED:
            if keyword in schema:
                raise _cannot(where, keyword)
        for keyword in ("$ref", "allOf", "anyOf", "oneOf"):
            if keyword in schema:
                rest = {key: value for key, value in schema.items() if key != keyword}
                return self._composed(keyword, schema[keyword], rest, where)
        values = listed(schema)
        if values is not None:
            return self._listed(values, schema, where)
        return self._of_types(schema, where)

    def _composed(self, keyword: str, value: Any, rest: Schema, where: str) -> str:
        below = f"{where}.{keyword}"
        if keyword == "$ref":
            self._references.combined([{"$ref": value}], where)  # refuses a circle
            return self._joined(rest, [self._references.pointed(value, where)], below)
        if not value or not all(isinstance(one, dict | bool) for one in value):
            raise UserError(f"{where}: {keyword} must be a list of schemas")
        if keyword == "allOf":
            return self._joined(rest, value, below)
        ways = [self._references.combined([rest, way], below) for way in value]
        ways = [way for way in ways if way is not False]
        if not ways:
            raise UserError(f"{where}: no value is valid there")
        if keyword == "oneOf":
            self._references.check_exclusive(ways, where)
        return either(self.value(way, f"{below}[{i}]") for i, way in enumerate(ways))

    def _joined(self, rest: Schema, schemas: list[Any], where: str) -> str:
        """A rule for values that are valid for all of these. A single schema is not merged: it
        keeps its rule, so that recursion through it ends."""
        if len(schemas) == 1 and not rest.keys() - ANNOTATIONS:
            return self.value(schemas[0], where)
        return self.value(self._references.combined([rest, *schemas], where), where)

    def _listed(self, values: list[Any], schema: Schema, where: str) -> str:
        keyword = "enum" if "enum" in schema else "const"
        beside = schema.keys() - ANNOTATIONS - {"enum", "const", "type"}
        spoken = [key for keys in KEYWORDS.values() for key in sorted(keys & beside)]
        if spoken:
            raise UserError(f"{where}: {spoken[0]} cannot be enforced beside {keyword}")
        if not values:
            raise UserError(f"{where}: no value is valid there")
        return either(self._literal(value, where) for value in values)

    def _literal(self, value: Any, where: str) -> str:
        if isinstance(value, str):
            return f"{QUOTE} {literal(value)} {QUOTE}" if value else f"{QUOTE} {QUOTE}"
        if isinstance(value, list):
            items = ' "," '.join(self._literal(item, where) for item in value)
            return f'"[" {items} "]"'
        if isinstance(value, dict):
            keys = _sorted(value)
            pairs = [f"{_key(key, where)} {self._literal(value[key], where)}" for key in keys]
            body = ' "," '.join(pairs)
            return f'"{{" {body} "}}"'
        return literal(json.dumps(value))

    def _of_types(self, schema: Schema, where: str) -> str:
        types = written_types(schema)
        if not types:
            raise UserError(f"{where}: no value is valid there")
        if "number" in types:
            types = [kind for kind in types if kind != "integer"]
        return either(self._of_type(kind, schema, where) for kind in types)

    def _of_type(self, kind: Any, schema: Schema, where: str) -> str:
        match kind:
            case "string":
                return self._string(schema, where)
            case "number" | "integer":
                return _number(kind, schema, where)
            case "boolean":
                return '"true" | "false"'
            case "null":
                return '"null"'
            case "array":
                return self._array(schema, where)
            case "object":
                return self.object(schema, where)
        raise UserError(f"{where}: unknown type {kind!r}")

    def _string(self, schema: Schema, where: str) -> str:
        shortest, longest = _count(schema, "minLength"), _count(schema, "maxLength")
        conditions = []
        if shortest or longest is not None:
            _check_order(shortest, longest, where)
            bounds = f"{shortest or 0},{'' if longest is None else longest}"
            conditions.append(f"/(?s:.{{{bounds}}})/")
        if "pattern" in schema:
            conditions.append(f"/{self._pattern(schema['pattern'], where)}/")
        if not conditions:
            return "string"
        return f"{QUOTE} {self._rules.terminal(' & '.join(conditions))} {QUOTE}"

    def _pattern(self, pattern: str, where: str) -> str:
        try:
            return whole_regex(pattern)
        except UserError as problem:
            raise UserError(f"{where}: pattern {pattern!r} cannot be enforced: {problem}") from None

    def _array(self, schema: Schema, where: str) -> str:
        for keyword in REFUSED_OF_ARRAYS:
            if keyword in schema:
                raise _cannot(where, keyword)
        if schema.get("uniqueItems"):
            raise _cannot(where, "uniqueItems")
        fewest, most = _count(schema, "minItems") or 0, _count(schema, "maxItems")
        _check_order(fewest, most, where)
        if most == 0:
            return '"[" "]"'
        first = schema.get("prefixItems", [])[:most]
        rest = schema.get("items", True)
        heads = [self.value(item, f"{where}.prefixItems[{i}]") for i, item in enumerate(first)]
        left = None if most is None else most - len(heads)
        if left == 0 or rest is False:
            if fewest > len(heads):
                raise UserError(f"{where}: no array has so many items (minItems)")
            return array(heads, "", fewest)
        item = self.value(rest, f"{where}.items")
        needed = max(fewest - len(heads), 0)
        if heads:
            return array(heads, more(item, needed, left), fewest)
        others = more(item, max(needed - 1, 0), None if left is None else left - 1)
        return array([f"{item} {others}"], "", fewest)

    def object(self, schema: Schema, where: str) -> str:
        """The body of a rule for objects that are valid for `schema`; its other types are
        ignored."""
        for keyword in REFUSED_OF_OBJECTS:
            if keyword in schema:
                raise _cannot(where, keyword)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        known = {**dict.fromkeys(required, schema.get("additionalProperties", True)), **properties}
        named = {k: v for k, v in known.items() if v is not False or k in required}
        others = schema.get("additionalProperties", not named and not schema.keys() & UNKNOWN)
        unknown = [key for key in required if key not in properties]
        if unknown and schema.get("additionalProperties") is False:
            raise UserError(f"{where}: {unknown[0]!r} is required, and additionalProperties false")
        if unknown and schema.keys() & UNKNOWN:
            raise _cannot(where, f"unevaluatedProperties beside {unknown[0]!r}, which is required,")
        _check_sizes(schema, len(required), len(named) if others is False else None, where)
        body, empty = self._pairs(named, required, where)
        if others is not False:
            body = self._other_pairs(body, empty, others, known, where)
        return f'"{{" {optional(body) if empty else body} "}}"'

    def _pairs(self, named: Schema, required: list[str], where: str) -> tuple[str, bool]:
        """A rule for the named pairs, in the order in which Gemma writes them, and whether all of
        them may be absent."""
        so_far, empty = "", True
        for key in _sorted(named):
            value = self.value(named[key], f"{where}.properties.{_shown(key)}")
            pair = self._rules.add(f"{_key(key, where)} {value}")
            ways = [pair] if empty else []
            if so_far:
                ways.append(f'{so_far} "," {pair}')
            if so_far and key not in required:
                ways.append(so_far)
            so_far, empty = self._rules.add(" | ".join(ways)), empty and key not in required
        return so_far, empty

    def _other_pairs(self, body: str, empty: bool, others: Any, known: Schema, where: str) -> str:
        key = "KEY"
        if known:
            names = " | ".join(map(literal, known))
            key = self._rules.terminal(f"KEY & ~( {names} )")
        value = self.value(others, f"{where}.additionalProperties")
        pair = self._rules.add(f'{key} ":" {value}')
        alone = [f'{pair} ( "," {pair} )*'] if empty else []
        beside = [f'{body} ( "," {pair} )*'] if body else []
        return self._rules.add(" | ".join(beside + alone))


UNKNOWN = {"unevaluatedProperties"}


def _number(kind: str, schema: Schema, where: str) -> str:
    bounds = {key: schema[key] for key in sorted(KEYWORDS["number"] & schema.keys())}
    if not bounds:
        return "INTEGER" if kind == "integer" else "NUMBER"
    if not bounds.keys() & {"minimum", "exclusiveMinimum"}:
        bounds["minimum"] = -FARTHEST
    if not bounds.keys() & {"maximum", "exclusiveMaximum"}:
        bounds["maximum"] = FARTHEST
    low = max(bounds[key] for key in ("minimum", "exclusiveMinimum") if key in bounds)
    high = min(bounds[key] for key in ("maximum", "exclusiveMaximum") if key in bounds)
    _check_order(low, high, where)
    return f"%json {json.dumps({'type': kind, **bounds})}"


def _key(key: str, where: str) -> str:
    if not key or set(key) & NOT_IN_A_KEY or " " in key or not key.isprintable():
        raise UserError(f"{where}: the key {key!r} cannot be written in Gemma's syntax; rename it")
    return literal(key + ":")


def _sorted(names: Any) -> list[str]:
    """The order in which the chat template writes keys: without regard to case."""
    return sorted(names, key=str.lower)


def _check_shape(schema: Schema, where: str) -> None:
    try:
        check_shape(schema)
    except UserError as problem:
        raise UserError(f"{where}: {problem}") from None


def _count(schema: Schema, keyword: str) -> int | None:
    return int(schema[keyword]) if keyword in schema else None


def _check_order(least: Any, most: Any, where: str) -> None:
    if least is not None and most is not None and least > most:
        raise UserError(f"{where}: no value is valid there, from {least} to {most}")


def _check_sizes(schema: Schema, fewest: int, most: int | None, where: str) -> None:
    """Raise UserError for minProperties and maxProperties, unless the names alone imply them."""
    if schema.get("minProperties", 0) > fewest:
        raise _cannot(where, "minProperties")
    limit = schema.get("maxProperties")
    if limit is not None and (most is None or limit < most):
        raise _cannot(where, "maxProperties")


def _cannot(where: str, keyword: str) -> UserError:
    return UserError(f"{where}: {keyword} cannot be enforced in a call; leave it out")


def _shown(key: str) -> str:
    """Within a path, which errors and the log print on one line."""
    return key if key.isprintable() else repr(key)[1:-1]
