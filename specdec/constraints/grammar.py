"""Grammars in llguidance's form, composed of parts."""

from __future__ import annotations

import json
from typing import Any

from specdec.constraints.trial import TRIALS
from specdec.core.errors import UserError

Part = dict[str, Any]
"""A grammar to refer to by its name: {"lark_grammar": ...} or {"json_schema": ...}."""
HEADER = '%llguidance {"no_forcing": true}\n'
"""Allows every tokenisation of forced bytes. By default llguidance allows only its own one, which
would bar the model from the tokens that it was trained on."""


def composed(start: str, parts: dict[str, Part]) -> str:
    """start: Lark, which refers to a part as `@name`."""
    named = [{"name": name} | part for name, part in parts.items()]
    return json.dumps({"grammars": [{"name": "start", "lark_grammar": HEADER + start}, *named]})


def part_of(grammar: str) -> Part:
    """The only part of a grammar that llguidance made."""
    (part,) = json.loads(grammar)["grammars"]
    return {key: part[key] for key in ("json_schema", "lark_grammar") if part[key] is not None}


def check(grammar: str, what: str) -> None:
    """Raise UserError if llguidance can't compile the grammar, or would crash on it."""
    complaint = TRIALS.refusal(grammar)
    if complaint:
        raise UserError(f"{what}: {first_line(complaint)}")


def first_line(complaint: str) -> str:
    """The first line of llguidance's message, which names the error; at most 300 characters."""
    lines = complaint.strip().splitlines() or ["no reason given"]
    return lines[0][:300]
