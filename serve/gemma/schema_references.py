"""Resolves `$ref`s of a JSON schema and merges schemas that apply together."""

from __future__ import annotations

from typing import Any

from serve.gemma.schema_parts import Schema, both, check_shape, excludes
from specdec.core.errors import UserError

MOST_REFERENCES = 32
"""Most `$ref`s in a row."""
MOST_WAYS = 64
"""Most schemas of a `oneOf`. Python compares schemas while it holds the GIL; more would delay the
tokens of all requests."""


class References:
    """Resolves references within one root schema."""

    def __init__(self, root: Schema) -> None:
        self._root = root

    def combined(self, schemas: list[Any], where: str) -> Schema | bool:
        """One schema for the values that are valid for all of these; False if there are none.
        Raises UserError."""
        merged: Schema | bool = {}
        for schema in schemas:
            try:
                merged = both(merged, self.resolved(schema))
            except UserError as problem:
                raise UserError(f"{where}: {problem}") from None
        return merged

    def resolved(self, schema: Any) -> Any:
        """The schema, merged with what its `$ref` points at if it has one."""
        seen: list[str] = []
        while isinstance(schema, dict) and "$ref" in schema:
            check_shape(schema)
            if schema["$ref"] in seen:
                raise UserError(f"$ref {schema['$ref']!r} points at itself")
            if len(seen) == MOST_REFERENCES:
                raise UserError(f"more than {MOST_REFERENCES} $ref point at each other in a row")
            seen.append(schema["$ref"])
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            schema = both(rest, self.pointed(schema["$ref"], "$ref"))
        if isinstance(schema, dict):
            check_shape(schema)
        return schema

    def pointed(self, pointer: str, where: str) -> Any:
        """The part of the root schema that a `$ref` points at. Raises UserError."""
        if not pointer.startswith("#"):
            raise UserError(f"{where}: $ref {pointer!r} does not point into the schema itself")
        found: Any = self._root
        for part in pointer[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or name not in found:
                raise UserError(f"{where}: $ref {pointer!r} points at nothing")
            found = found[name]
        return found

    def check_exclusive(self, schemas: list[Any], where: str) -> None:
        """Raise UserError unless no value is valid for two of these: `oneOf` is then `anyOf`."""
        if len(schemas) > MOST_WAYS:
            raise UserError(f"{where}: oneOf of more than {MOST_WAYS} schemas; use anyOf")
        pairs = [(a, b) for a in schemas for b in schemas if a is not b]
        if not all(
            isinstance(a, dict) and isinstance(b, dict) and excludes(a, b, self.resolved)
            for a, b in pairs
        ):
            raise UserError(
                f"{where}: oneOf cannot be enforced where its schemas may overlap; use anyOf"
            )
