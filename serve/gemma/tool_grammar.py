"""The grammar of an answer that may or must call tools, in llguidance's Lark and Gemma's syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from serve.gemma.lark_rules import FREE, LarkRules
from serve.gemma.tool_schema import SchemaRules
from specdec.core.errors import UserError

NAME = re.compile(r"[A-Za-z0-9_.\-]+")
LONGEST_SCHEMA = 2**17
"""Most bytes of a schema that is followed strictly: Python reads it while it holds the GIL, which
delays all requests."""


def tool_grammar(
    tools: list[dict[str, Any]],
    *,
    at_least: int,
    at_most: int | None,
    names: Collection[str] | None = None,
) -> str:
    """A Lark grammar for llguidance, for an answer up to the end of the turn.

    tools: OpenAI's, as in a chat request. Arguments of a tool with `strict: true` are valid for
    its schema; those of any other tool are any object that Gemma can write.
    at_least: fewest calls. With 0, text may come before the calls; with more, there is no text.
    at_most: most calls, None for any number.
    names: the only functions that may be called; None for all.

    Keys come in the chat template's order. `format` is an annotation, as in the standard. The
    vocabulary must have the control tokens that the grammar uses; the end of the turn is
    llguidance's end of sequence. Raises UserError with the tool's name and what can't be enforced.
    """
    functions = [tool["function"] for tool in tools]
    offered = [f for f in functions if names is None or f["name"] in names]
    if not offered:
        raise UserError("none of the functions that may be called is among the tools")
    rules = [LarkRules(f"tool{number}") for number in range(len(offered))]
    calls = " | ".join(map(_call, offered, rules))
    times = f"{{{at_least},{'' if at_most is None else at_most}}}"
    text = "TEXT " if at_least == 0 else ""
    return f"""\
start: {text}call{times}
call: <|tool_call> "call:" ( {calls} ) <tool_call|>
{"".join(map(str, rules))}{FREE}"""


def _call(function: dict[str, Any], rules: LarkRules) -> str:
    name = function["name"]
    if not NAME.fullmatch(name):
        raise UserError(f"tool {name!r}: a name may have letters, digits, '_', '-' and '.' only")
    if not function.get("strict"):
        return f'"{name}" any_object'
    schema = function.get("parameters") or {"type": "object", "additionalProperties": False}
    try:
        if len(json.dumps(schema)) > LONGEST_SCHEMA:
            raise UserError(f"the schema is longer than {LONGEST_SCHEMA} bytes")
        return f'"{name}" {_arguments(schema, rules)}'
    except UserError as problem:
        raise UserError(f"tool {name!r}, strict: {problem}") from None
    except RecursionError:
        raise UserError(f"tool {name!r}, strict: the schema is nested too deeply") from None


def _arguments(schema: dict[str, Any], rules: LarkRules) -> str:
    """A rule for a call's arguments: an object, even if the schema admits other types."""
    if schema.get("type", "object") != "object":
        raise UserError("parameters must be an object's schema")
    return SchemaRules(schema, rules).arguments({**schema, "type": "object"}, "parameters")
