"""The structure that a text must have, as a grammar."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence as Seqs
from dataclasses import asdict, dataclass
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from specdec.constraints.grammar import Part, part_of
from specdec.constraints.json_schema import json_part
from specdec.core.errors import UserError


@dataclass(frozen=True)
class Structure:
    """Exactly one of its fields is set."""

    json: str | dict[str, Any] | bool | None = None
    """A JSON schema, or its text."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    choice: Seqs[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """Lark or GBNF."""

    @property
    def set_fields(self) -> list[str]:
        return [name for name, value in asdict(self).items() if value not in (None, False)]

    def part(self) -> Part:
        """Raises UserError for what can't be enforced exactly."""
        if self.json_object:
            return json_part({"type": "object"})
        if self.json is not None:
            return json_part(_schema(self.json))
        if self.regex is not None:
            return part_of(LLMatcher.grammar_from_regex(self.regex))
        if self.choice is not None:
            words = " | ".join(json_module.dumps(word, ensure_ascii=False) for word in self.choice)
            return {"lark_grammar": f"start: {words}\n"}
        assert self.grammar is not None
        try:
            return {"lark_grammar": any_to_lark(self.grammar)}
        except (GbnfToLarkError, ValueError) as problem:
            raise UserError(f"this grammar is neither Lark nor GBNF: {problem}") from None


def _schema(schema: str | dict[str, Any] | bool) -> dict[str, Any] | bool:
    if not isinstance(schema, str):
        return schema
    try:
        read = json_module.loads(schema)
    except (ValueError, RecursionError) as problem:
        raise UserError(f"this schema is not JSON: {problem}") from None
    if not isinstance(read, (dict, bool)):
        raise UserError("a JSON schema is an object")
    return read
