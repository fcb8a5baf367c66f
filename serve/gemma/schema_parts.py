"""Merges JSON schemas into one, and checks whether two exclude each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from specdec.constraints.json_values import TYPES, same, type_of
from specdec.core.errors import UserError

Schema = dict[str, Any]
# Keywords without effect on validity. By the standard, `format` is one of them.
ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
ANNOTATIONS |= {"$comment", "$schema", "$id", "$defs", "definitions", "format", "nullable"}
ANNOTATIONS |= {"contentEncoding", "contentMediaType", "contentSchema", "discriminator"}
KEYWORDS = {
    "string": {"minLength", "maxLength", "pattern"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"}
    | {"minContains", "maxContains", "unevaluatedItems", "additionalItems"},
    "object": {"properties", "required", "additionalProperties", "patternProperties"}
    | {"propertyNames", "minProperties", "maxProperties", "dependentRequired", "dependencies"}
    | {"dependentSchemas", "unevaluatedProperties"},
}
CLOSING = ("additionalProperties", "unevaluatedProperties")
ITEMS = ("items", "prefixItems")
LOWER = {"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"}
UPPER = {"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"}

SHAPES: dict[str, tuple[type, ...]] = {
    "$ref": (str,),
    "type": (str, list),
    "enum": (list,),
    "properties": (dict,),
    "required": (list,),
    "additionalProperties": (dict, bool),
    "items": (dict, bool),
    "prefixItems": (list,),
    "pattern": (str,),
    **dict.fromkeys(("allOf", "anyOf", "oneOf"), (list,)),
    **dict.fromkeys(KEYWORDS["number"], (int, float)),
}
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")

Resolve = Callable[[Schema], Schema]
"""Replaces a schema's `$ref` by the schema that it points at."""


def check_shape(schema: Schema) -> None:
    """Raise UserError for a keyword with a value of the wrong type by the standard."""
    for keyword, kinds in SHAPES.items():
        value = schema.get(keyword, kinds[0]())
        if not isinstance(value, kinds) or (bool not in kinds and isinstance(value, bool)):
            raise UserError(f"{keyword} has a value of the wrong kind")
    for keyword in COUNTS:
        value = schema.get(keyword, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 or value < 0:
            raise UserError(f"{keyword} must be a whole number")
    if not all(isinstance(name, str) for name in schema.get("required", [])):
        raise UserError("required must be a list of names")


def valid_types(schema: Schema) -> list[str]:
    """Types of the values that are valid for the schema."""
    if "type" in schema:
        types = schema["type"]
        return [types] if isinstance(types, str) else list(types)
    return list(TYPES)


def written_types(schema: Schema) -> list[str]:
    """Types that the grammar writes for the schema: those of `type`; without it, the types to which
    its keywords apply; without such keywords, all."""
    types = valid_types(schema)
    if "type" in schema:
        return types
    spoken = [kind for kind, keywords in KEYWORDS.items() if keywords & schema.keys()]
    return spoken or types


def has_type(value: Any, types: list[str]) -> bool:
    kind = type_of(value)
    return kind in types or (kind == "integer" and "number" in types)


def listed(schema: Schema) -> list[Any] | None:
    """The values allowed by `const` and `enum` that have a valid type; None without either
    keyword."""
    if "const" in schema and "enum" in schema:
        values = [v for v in schema["enum"] if same(v, schema["const"])]
    elif "const" in schema or "enum" in schema:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
    else:
        return None
    return [value for value in values if has_type(value, valid_types(schema))]


def both(one: Schema | bool, other: Schema | bool) -> Schema | bool:
    """A schema for the values that are valid for both. Raises UserError if they can't be merged."""
    if isinstance(one, bool):
        return other if one else False
    if isinstance(other, bool):
        return one if other else False
    if not isinstance(one, dict) or not isinstance(other, dict):
        raise UserError("what is no object must not stand for a schema")
    one, other = _assertions(one), _assertions(other)
    if one == other:
        return one
    _check_closing(one, other)
    _check_items(one, other)
    merged = {**one, **other}
    for key in one.keys() & other.keys():
        if key == "type":
            merged[key] = _common_types(one, other)
            if not merged[key]:
                return False
        else:
            merged[key] = _both_say(key, one[key], other[key])
    return merged


def _assertions(schema: Schema) -> Schema:
    return {key: value for key, value in schema.items() if key not in ANNOTATIONS}


def _check_closing(one: Schema, other: Schema) -> None:
    """Raise UserError if one schema forbids further properties and the other names a property that
    the first does not name."""
    for closed, free in ((one, other), (other, one)):
        if any(key in closed for key in CLOSING):
            unknown = free.get("properties", {}).keys() - closed.get("properties", {}).keys()
            if unknown:
                raise UserError(f"additionalProperties beside a schema that adds {min(unknown)!r}")


def _check_items(one: Schema, other: Schema) -> None:
    """Raise UserError if both schemas have `items` or `prefixItems` and they differ: `items`
    applies to the items after the `prefixItems` of its own schema, so they can't be merged by
    keyword."""
    ours, theirs = ({key: s[key] for key in ITEMS if key in s} for s in (one, other))
    if ours and theirs and ours != theirs:
        raise UserError("items or prefixItems have two different values")


def _common_types(one: Schema, other: Schema) -> list[str]:
    ours, theirs = valid_types(one), valid_types(other)
    common = [kind for kind in ours if kind in theirs]
    if "integer" in ours + theirs and "number" in ours + theirs and "integer" not in common:
        common = [kind for kind in common if kind != "number"] + ["integer"]
    return common


def _both_say(key: str, one: Any, other: Any) -> Any:
    if same(one, other):
        return one
    if key == "required":
        return [*one, *(name for name in other if name not in one)]
    if key == "properties":
        shared = {name: both(one[name], other[name]) for name in one.keys() & other.keys()}
        return {**one, **other, **shared}
    if key == "enum":
        return [value for value in one if any(same(value, also) for also in other)]
    if key in LOWER:
        return max(one, other)
    if key in UPPER:
        return min(one, other)
    raise UserError(f"{key} has two different values: {json.dumps(one)[:40]}")


def excludes(written: Schema, other: Schema, resolve: Resolve) -> bool:
    """Whether it is certain that no value that the grammar of `written` produces is valid for
    `other`."""
    written, other = resolve(written), resolve(other)
    ours, theirs = listed(written), listed(other)
    kinds = valid_types(other) if theirs is None else [type_of(value) for value in theirs]
    if ours is not None:
        values = ours if theirs is None else [v for v in ours if any(same(v, t) for t in theirs)]
        return not any(has_type(value, kinds) for value in values)
    if not _overlap(written_types(written), kinds):
        return True
    return written_types(written) == ["object"] and _objects_exclude(written, other, resolve)


def _overlap(ours: list[str], theirs: list[str]) -> bool:
    numbers = {"integer", "number"}
    return bool(set(ours) & set(theirs)) or bool(numbers & set(ours) and numbers & set(theirs))


def _objects_exclude(written: Schema, other: Schema, resolve: Resolve) -> bool:
    ours, theirs = written.get("properties", {}), other.get("properties", {})
    required = written.get("required", [])
    closed = bool(ours or required) and written.get("additionalProperties") in (None, False)
    if closed and set(other.get("required", [])) - ours.keys() - set(required):
        return True
    if other.get("additionalProperties") is False and set(required) - theirs.keys():
        return True
    return any(
        isinstance(ours[name], dict)
        and isinstance(theirs[name], dict)
        and excludes(ours[name], theirs[name], resolve)
        for name in required
        if name in ours and name in theirs
    )
