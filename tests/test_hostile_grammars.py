"""Grammars that would kill or hang the process that compiles them are refused, and nothing else
comes of it."""

from __future__ import annotations

import json
import os
import signal

import pytest

from serve.gemma.tool_grammar import tool_grammar
from specdec.constraints import trial
from specdec.constraints.exclusive import exclusive
from specdec.constraints.grammar import composed
from specdec.constraints.json_schema import json_grammar
from specdec.constraints.trial import TRIAL
from specdec.core.errors import UserError
from tests.constrained import mini_vocabulary

PRIMES = 999983, 999979, 999961, 999959, 999953
DEEP = "nested too deeply"
LONG = "more than 3 seconds|too large"
"""Where time and memory run out at about the same time, either may come first."""


def chain(length: int, link) -> dict:
    """Definitions that refer to each other in a row."""
    links = {f"a{i}": link({"$ref": f"#/$defs/a{i + 1}"}) for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": links | {f"a{length}": {"type": "integer"}}}


SCHEMAS = {
    "references": (chain(20_000, lambda end: end), DEEP),
    "objects": (
        chain(5_000, lambda end: {"properties": {"x": end}, "required": ["x"], "type": "object"}),
        DEEP,
    ),
    "arrays": (chain(20_000, lambda end: {"items": end, "minItems": 1, "type": "array"}), DEEP),
    "ways": (chain(20_000, lambda end: {"anyOf": [end]}), DEEP),
    "multiples": (
        {"allOf": [{"type": "integer", "multipleOf": p} for p in PRIMES]},
        LONG,
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_that_would_end_the_process(name):
    schema, words = SCHEMAS[name]
    with pytest.raises(UserError, match=words) as refusal:
        json_grammar(schema)
    assert "\n" not in str(refusal.value)
    assert json_grammar({"type": "integer"})  # the next one is none the worse


@pytest.mark.parametrize("kind", ["rule", "TERMINAL"])
def test_a_lark_grammar_that_would_end_the_process(kind):
    rows = "".join(f"{kind}{i}: {kind}{i + 1}\n" for i in range(50_000))
    grammar = composed(f'start: {kind}0\n{rows}{kind}50000: "a"\n', {})
    with pytest.raises(UserError, match=DEEP):
        mini_vocabulary().matcher(grammar)


def test_what_llguidance_cannot_read_is_refused():
    nested: dict = {"type": "integer"}
    for _ in range(150):
        nested = {"type": "array", "items": nested}
    for schema in (nested, {"const": float("inf")}, {"oneOf": [{"const": float("nan")}, {}]}):
        with pytest.raises(UserError):
            json_grammar(schema)


def test_the_process_comes_back_after_somebody_ended_it():
    assert TRIAL.complaint(composed('start: "a"\n', {})) == ""
    assert TRIAL._process is not None
    os.kill(TRIAL._process.pid, signal.SIGKILL)
    TRIAL._process.wait()
    assert TRIAL.complaint(composed('start: "a"\n', {})) == ""


def test_control_tokens_are_known_there():
    grammar = composed('start: <|tool_call> <|"|> "a" <|"|> <tool_call|>\n', {})
    assert trial.CONTROL.findall(json.dumps('<|"|>')) == ['<|\\"|>']
    assert TRIAL.complaint(grammar) == ""


def test_thousands_of_ways_are_compared_in_one_pass():
    assert exclusive({"const": i} for i in range(50_000))
    assert not exclusive([*({"const": i} for i in range(50_000)), {"enum": [7.0]}])
    assert exclusive([{"const": True}, {"const": 1}, {"const": [1]}, {"const": [True]}])
    assert not exclusive([{"const": {"a": [1]}}, {"const": {"a": [1.0]}}])
    assert not exclusive([{"type": "number"}, {"const": 3}])
    assert exclusive([False, {"type": ["string", "null"]}, {"enum": [3, 4.5]}, False])


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": chain(2_000, lambda end: end)}}, "points at nothing"),
        ({**chain(2_000, lambda end: end), "type": "object"}, "in a row"),
        ({"properties": {"a": {"oneOf": [{"const": i} for i in range(99)]}}}, "more than 64"),
        ({"properties": {"a": {"pattern": "a" * 2**17}}}, "longer than"),
    ],
)
def test_a_strict_tool_that_would_hold_everybody_up(schema, words):
    function = {"name": "f", "strict": True, "parameters": schema}
    with pytest.raises(UserError, match=words):
        tool_grammar([{"type": "function", "function": function}], at_least=1, at_most=1)
