"""Whatever follows a tool's grammar is a call that validates; what does not is refused."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from typing import Any

import jsonschema
import llguidance.numpy
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from llguidance import LLMatcher

from serve.gemma.output import CallArguments, CallBegan, Content, GemmaOutput, Reasoning
from serve.gemma.tool_grammar import tool_grammar
from serve.structure import Thinking, after_thought, calls_grammar, rules_for
from specdec.core.errors import UserError
from tests.serve.gemma_syntax import gemma_value
from tests.serve.mini_grammar import GRAMMAR_TOKENIZER, STOPS, TOKENIZER
from tests.support.chats import chat_of_body

# Tokens that bring a random walk to its end.
ENDING = {
    i
    for i in range(TOKENIZER.vocab_size)
    if set(TOKENIZER.decode([i])) <= set("}],:") or GRAMMAR_TOKENIZER.is_special_token(i)
}


def tool(name: str, schema: Any = None, strict: bool = True) -> dict[str, Any]:
    function = {"name": name, "description": "x", "strict": strict}
    return {
        "type": "function",
        "function": function | ({} if schema is None else {"parameters": schema}),
    }


def strict_grammar(schema: dict[str, Any]) -> str:
    return tool_grammar([tool("f", schema)], at_least=1, at_most=1)


@lru_cache(maxsize=4)
def _matcher(grammar: str) -> LLMatcher:
    matcher = LLMatcher(GRAMMAR_TOKENIZER, LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def matcher_of(grammar: str) -> LLMatcher:
    return _matcher(grammar).deep_copy()


def accepts(grammar: str, text: str) -> bool:
    matcher, ids = matcher_of(grammar), TOKENIZER.encode(text)[1:]
    if matcher.validate_tokens(ids) < len(ids):
        return False
    return matcher.consume_tokens(ids) and matcher.is_accepting()


def accepts_value(schema: dict[str, Any], value: Any) -> bool:
    return accepts(strict_grammar(schema), f"<|tool_call>call:f{gemma_value(value)}<tool_call|>")


def walk(grammar: str, chance: random.Random, limit: int = 300) -> list[int] | None:
    """Tokens drawn among those that the masks allow; None where there is no end before `limit`."""
    matcher, ids = matcher_of(grammar), []
    mask = llguidance.numpy.allocate_token_bitmask(1, GRAMMAR_TOKENIZER.vocab_size)
    while len(ids) < limit:
        llguidance.numpy.fill_next_token_bitmask(matcher, mask, 0)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: TOKENIZER.vocab_size]
        allowed = np.flatnonzero(bits).tolist()
        assert allowed and not matcher.is_error(), matcher.get_error()
        ending = [i for i in allowed if i in ENDING]
        token = chance.choice(ending if ending and chance.random() < 0.4 else allowed)
        if token in STOPS:
            return ids
        assert matcher.consume_token(token)
        ids.append(token)
    return None


def read(ids: list[int], thinking_open: bool = False) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning, and each call's name and arguments."""
    output = GemmaOutput(TOKENIZER, tools=True, thinking_open=thinking_open)
    parts = [part for token in ids for part in output.feed(token)] + output.finish()
    content = "".join(p.text for p in parts if isinstance(p, Content))
    reasoning = "".join(p.text for p in parts if isinstance(p, Reasoning))
    names = [p.name for p in parts if isinstance(p, CallBegan)]
    pieces = [p for p in parts if isinstance(p, CallArguments)]
    texts = ["".join(p.text for p in pieces if p.index == i) for i in range(len(names))]
    return content, reasoning, list(zip(names, texts, strict=True))


def check_walks(schema: dict[str, Any], seed: int, count: int) -> int:
    """Walk `count` times; each complete walk is one call with valid arguments. Returns how many
    ended."""
    grammar, chance, ended = strict_grammar(schema), random.Random(seed), 0
    validator = jsonschema.Draft202012Validator(schema)
    for _ in range(count):
        if (ids := walk(grammar, chance)) is not None:
            content, reasoning, ((name, text),) = read(ids)
            assert (content, reasoning, name) == ("", "", "f")
            validator.validate(json.loads(text))
            ended += 1
    return ended


def an_object(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    fields = {"type": "object", "properties": properties, "required": list(required)}
    return fields | {"additionalProperties": False} | more


TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": an_object(
            {
                "name": {"type": "string"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                "parent": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "name",
        )
    },
}
SHAPES = {
    "oneOf": [
        an_object({"kind": {"const": "circle"}, "r": {"type": "number"}}, "kind", "r"),
        an_object({"kind": {"const": "box"}, "w": {"type": "integer"}}, "kind"),
    ]
}
ENUMERATED = ["a", "ab", "", 1, 12, True, None, [1, "x"], {"k": "v", "B": 2}, [], {}]
ENUMERATED += ["\u00e9\u4e16\U0001f600", 'q"\\\n\t/|()', "\x00\x7f", 2.5, -0.0001]
# A schema, arguments that are valid for it, and arguments that are not.
CASES: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    (
        {"type": "object", "required": ["x"], "additionalProperties": {"type": "integer"}},
        [{"x": 1}, {"x": 2, "y": 3}],
        [{}, {"x": "a"}, {"x": 1, "y": "c"}],
    ),
    (
        {"type": "object", "properties": {"a": False, "ab": True}, "additionalProperties": True},
        [{}, {"b": 1}, {"ab": 1}],
        [{"a": 1}],
    ),
    (an_object({}), [{}], [{"a": 1}]),
    (
        an_object({"b": {"type": "integer"}, "A": {"type": "string"}, "c": {}}, "b"),
        [{"b": 1}, {"A": "x", "b": -20}, {"b": 0, "c": [None, {"k": "v"}]}],
        [{}, {"A": "x"}, {"b": 1.5}, {"b": "1"}, {"b": 1, "d": 2}, {"A": 1, "b": 1}],
    ),
    (
        an_object({"a": {"type": "null"}, "b": {"type": "boolean"}, "c": {"type": "number"}}),
        [{}, {"a": None}, {"b": True, "c": 1e5}, {"a": None, "c": -0.25}],
        [{"a": 0}, {"b": "true"}, {"c": None}],
    ),
    (
        an_object({"n": {"type": "integer", "minimum": 3, "exclusiveMaximum": 120}}, "n"),
        [{"n": 3}, {"n": 119}],
        [{"n": 2}, {"n": 120}, {"n": -5}, {"n": 1000}],
    ),
    (
        an_object({"n": {"minimum": 0.5, "maximum": 2}, "m": {"multipleOf": 5}}, "n"),
        [{"n": 0.5}, {"n": 1.75}, {"n": 2, "m": 15}],
        [{"n": 0.25}, {"n": 2.5}, {"n": 1, "m": 12}],
    ),
    (
        an_object({"n": {"type": "integer", "maximum": -1}, "m": {"type": "number", "minimum": 9}}),
        [{"n": -7}, {"m": 9}, {"m": 123456.5}],
        [{"n": 0}, {"m": 8.99}],
    ),
    (
        an_object({"s": {"type": "string", "minLength": 2, "maxLength": 4}}, "s"),
        [{"s": "ab"}, {"s": "\u4e16\u00e9\U0001f600"}, {"s": '"}]\n'}],
        [{"s": "a"}, {"s": "abcde"}, {"s": ""}, {"s": 12}],
    ),
    (
        an_object(
            {
                "date": {"type": "string", "pattern": r"^\d{4}-(0[1-9]|1[0-2])$"},
                "part": {"type": "string", "pattern": "b+c"},
                "path": {"pattern": r"^[^/\s]+/.*\.py$|^-$", "maxLength": 9},
            }
        ),
        [{"date": "2026-11"}, {"part": "abbcd"}, {"part": "bc"}, {"path": "a/b.py"}, {"path": "-"}],
        [{"date": "2026-13"}, {"date": "x2026-11"}, {"part": "b c"}, {"path": "a b/c.py"}]
        + [{"path": "a/long.long.py"}, {"path": "--"}],
    ),
    (
        an_object({"e": {"enum": ENUMERATED}}),
        [{"e": value} for value in ENUMERATED],
        [{"e": value} for value in ("b", "abc", 2, 123, False, [1], [1, "y"], {"k": "v"})],
    ),
    (
        an_object({"u": {"type": "string", "enum": ["c", "f", 3]}, "k": {"const": {"a": []}}}, "u"),
        [{"u": "c"}, {"k": {"a": []}, "u": "f"}],
        [{"u": 3}, {"u": "d"}, {"u": "c", "k": {}}],
    ),
    (
        an_object({"t": {"type": ["string", "null", "integer"], "minimum": 5, "minLength": 1}}),
        [{"t": "x"}, {"t": None}, {"t": 5}],
        [{"t": ""}, {"t": 4}, {"t": True}],
    ),
    (
        an_object({"a": {"type": "array", "items": {"type": "integer"}, "minItems": 2}}, "a"),
        [{"a": [1, 2]}, {"a": [1, 2, 3, 4, 5]}],
        [{"a": []}, {"a": [1]}, {"a": [1, "2"]}, {"a": {}}],
    ),
    (
        an_object({"a": {"items": {"type": "string"}, "minItems": 1, "maxItems": 3}}, "a"),
        [{"a": ["x"]}, {"a": ["x", "", "z"]}],
        [{"a": []}, {"a": ["x"] * 4}, {"a": [1]}],
    ),
    (
        an_object(
            {
                "a": {"prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False},
                "b": {"prefixItems": [{"const": 1}, {"const": 2}], "items": {"const": 3}}
                | {"minItems": 1, "maxItems": 4},
                "c": {"type": "array", "maxItems": 0},
                "d": {"prefixItems": [{"const": 1}, {}], "minItems": 2, "maxItems": 2},
            }
        ),
        [{"a": []}, {"a": ["x"]}, {"a": ["x", 1]}, {"b": [1]}, {"b": [1, 2, 3, 3]}, {"c": []}]
        + [{"d": [1, "x"]}],
        [{"a": [1]}, {"a": ["x", 1, 2]}, {"b": []}, {"b": [1, 3]}, {"b": [1, 2, 3, 3, 3]}]
        + [{"c": [1]}, {"d": [1]}, {"d": [1, 2, 3]}],
    ),
    (
        an_object({"v": {"anyOf": [{"type": "integer"}, {"type": "number", "minimum": 0.5}]}}, "v"),
        [{"v": -3}, {"v": 0.75}, {"v": 12}],
        [{"v": -3.5}, {"v": 0.25}, {"v": "x"}],
    ),
    (
        an_object(
            {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {}},
            anyOf=[{"required": ["a"]}, {"required": ["b", "c"]}],
        ),
        [{"a": "x"}, {"b": 1, "c": 2}, {"a": "x", "c": 1}],
        [{}, {"b": 1}, {"c": 1}],
    ),
    (an_object({"s": SHAPES}, "s"), [{"s": {"kind": "box"}}], [{"s": {"kind": "circle"}}]),
    (
        {"type": "object", **SHAPES},
        [{"kind": "circle", "r": 2.5}, {"kind": "box", "w": 3}],
        [{"kind": "circle", "w": 3}, {"kind": "x"}, {}],
    ),
    (
        an_object({"v": {"oneOf": [{"type": "string"}, {"type": "integer"}, {"const": None}]}}),
        [{"v": "x"}, {"v": 1}, {"v": None}],
        [{"v": 1.5}, {"v": []}],
    ),
    (
        an_object({"v": {"allOf": [{"type": "integer"}, {"minimum": 2}], "maximum": 4}}, "v"),
        [{"v": 2}, {"v": 4}],
        [{"v": 1}, {"v": 5}, {"v": "x"}],
    ),
    (
        TREE,
        [{"name": "a"}, {"children": [{"name": "b", "parent": None}], "name": "a"}]
        + [{"name": "a", "parent": {"children": [], "name": "c"}}],
        [{}, {"children": [{}], "name": "a"}, {"name": "a", "parent": 1}],
    ),
    (
        an_object(
            {"n": {"$ref": "#/definitions/count", "description": "x", "maximum": 9}},
            definitions={"count": {"type": "integer", "minimum": 1}},
        ),
        [{"n": 1}, {"n": 9}],
        [{"n": 0}, {"n": 10}],
    ),
    (
        an_object({"a": {"type": "integer"}}, additionalProperties={"type": "string"}),
        [{}, {"a": 1}, {"b": "x"}, {"a": 1, "b": "x", "cc": ""}, {"aa": "x"}],
        [{"a": "x"}, {"b": 1}, {"a": 1, "b": None}],
    ),
    (
        an_object({"map": {"type": "object"}, "list": {"type": "array"}}, "map"),
        [{"map": {}}, {"map": {"k": [1, {"x": None}]}, "list": [[], "a", -1.5e3]}],
        [{"map": []}, {"list": []}],
    ),
    (
        {"type": "object", "required": ["x"], "minProperties": 1, "title": "t", "format": "what"},
        [{"x": 1}, {"x": {"y": "z"}}],
        [{}],
    ),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_grammar_agrees_with_the_schema(number):
    schema, valid, invalid = CASES[number]
    validator = jsonschema.Draft202012Validator(schema)
    for value in valid:
        assert validator.is_valid(value)
        assert accepts_value(schema, value), value
    for value in invalid:
        assert not validator.is_valid(value), value
        assert not accepts_value(schema, value), value
    assert check_walks(schema, seed=number, count=12) > 3


NAMES = st.sampled_from(["a", "B", "c-d", "e.f", "longer_name", "Ab"])


def _number_schemas(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    bounds = st.tuples(st.integers(-200, 200), st.integers(0, 300)).map(
        lambda two: {"minimum": two[0], "maximum": two[0] + two[1]}
    )
    return st.one_of(st.just({}), bounds).map(lambda more: {"type": kind, **more})


STRINGS = st.tuples(st.integers(0, 3), st.integers(0, 5)).map(
    lambda two: {"type": "string", "minLength": two[0], "maxLength": two[0] + two[1]}
)
LEAVES = st.one_of(
    STRINGS,
    _number_schemas("integer"),
    _number_schemas("number"),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}, {}]),
    st.lists(st.sampled_from(["x", "xy", "", 1, 2.5, True, None, [1]]), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
)


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    properties = draw(st.dictionaries(NAMES, inner, max_size=4))
    required = [name for name in properties if draw(st.booleans())]
    return an_object(properties, *required)


@st.composite
def arrays(draw: st.DrawFn, inner: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    schema = {"type": "array", "items": draw(inner)}
    if draw(st.booleans()):
        schema["prefixItems"] = draw(st.lists(inner, min_size=1, max_size=2))
    fewest = draw(st.integers(0, 3))
    return schema | {"minItems": fewest, "maxItems": fewest + draw(st.integers(0, 2))}


def _nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    ways = st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some})
    return st.one_of(objects(inner), arrays(inner), ways)


SCHEMAS = objects(st.recursive(LEAVES, _nested, max_leaves=6))
SCALARS = st.sampled_from(["", "x", "xy", "a\nb", 0, 1, -3, 7, 2.5, 150, True, False, None])


def instance(schema: dict[str, Any], chance: random.Random) -> Any:
    """A value that is valid for one of the schemas above."""
    if "anyOf" in schema:
        return instance(chance.choice(schema["anyOf"]), chance)
    if "enum" in schema:
        return chance.choice(schema["enum"])
    kind = schema.get("type", "any")
    if isinstance(kind, list):
        kind = chance.choice(kind)
    if kind == "object":
        wanted = [
            k for k in schema["properties"] if k in schema["required"] or chance.random() < 0.5
        ]
        return {key: instance(schema["properties"][key], chance) for key in wanted}
    if kind == "array":
        prefix = schema.get("prefixItems", [])
        count = chance.randint(schema["minItems"], schema["maxItems"])
        items = [*prefix, *[schema["items"]] * count][:count]
        return [instance(item, chance) for item in items]
    low, high = schema.get("minimum", -1000), schema.get("maximum", 10**6)
    fraction = round(chance.uniform(low, high), 3)
    length = chance.randint(schema.get("minLength", 0), schema.get("maxLength", 6))
    return {
        "string": "".join(chance.choice('ab "\n{}]:,\u00e9\u4e16<|') for _ in range(length)),
        "integer": chance.randint(low, high),
        # A bound itself is written without a fraction: 2, not 2.0.
        "number": int(fraction) if fraction == int(fraction) else fraction,
        "boolean": chance.random() < 0.5,
        "null": None,
        "any": chance.choice([1, "x", [None, {"k": "v"}], {}, False]),
    }[kind]


@settings(deadline=None, max_examples=60)
@given(SCHEMAS, st.integers(0, 2**32), st.data())
def test_random_schemas_agree_with_the_validator(schema, seed, data):
    chance = random.Random(seed)
    validator = jsonschema.Draft202012Validator(schema)
    check_walks(schema, seed, count=3)
    for _ in range(4):
        value = instance(schema, chance)
        assert validator.is_valid(value)
        assert accepts_value(schema, value)
        if value:  # another value in a property's place is accepted only if it is valid
            changed = value | {data.draw(st.sampled_from(sorted(value))): data.draw(SCALARS)}
            assert validator.is_valid(changed) or not accepts_value(schema, changed)
            less = dict(list(value.items())[1:])
            assert validator.is_valid(less) == accepts_value(schema, less)


REFUSALS = [
    ({"a": {"type": "array", "uniqueItems": True}}, "properties.a: uniqueItems"),
    ({"a": {"type": "array", "contains": {}}}, "contains"),
    ({"a": {"not": {}}}, "properties.a: not cannot be enforced"),
    ({"a": {"if": {}}}, "if cannot"),
    ({"a": {"type": "object", "patternProperties": {"x": {}}}}, "patternProperties"),
    ({"a": {"type": "object", "propertyNames": {}}}, "propertyNames"),
    ({"a": {"type": "object", "minProperties": 1}}, "minProperties"),
    ({"a": {"type": "object", "maxProperties": 1}}, "maxProperties"),
    ({"a": {"enum": ["x"], "minLength": 1}}, "minLength cannot be enforced beside enum"),
    ({"a": {"type": "string", "enum": [1]}}, "no value is valid"),
    ({"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf cannot be enforced"),
    ({"a": {"oneOf": [{}, {"type": "number"}]}}, "oneOf cannot be enforced"),
    ({"a": {"$ref": "https://example.org/x"}}, "does not point into"),
    ({"a": {"$ref": "#/nowhere"}}, "points at nothing"),
    ({"a": {"$ref": "#/properties/a"}}, "points at itself"),
    ({"a": {"type": "string", "pattern": "(?=x)y"}}, "cannot be enforced"),
    ({"a": {"type": "string", "pattern": r"(a)\1"}}, "is not supported"),
    ({"a": {"type": "string", "pattern": "a^b"}}, "is not supported"),
    ({"a": {"type": "string", "pattern": "(a"}}, "not closed"),
    ({"a": {"type": "string", "pattern": "a)"}}, "not opened"),
    ({"a": {"type": "string", "pattern": "[a"}}, "not closed"),
    ({"a": {"type": "what"}}, "unknown type 'what'"),
    ({"a": False}, "no value is valid"),
    ({"a": {"minItems": 3, "maxItems": 2}}, "no value is valid"),
    ({"a": {"type": "integer", "minimum": 3, "maximum": 2}}, "no value is valid"),
    ({"a": {"type": "integer", "minimum": "3"}}, "minimum has a value of the wrong kind"),
    ({"a": {"minLength": -1}}, "minLength must be a whole number"),
    ({"a": {"anyOf": []}}, "anyOf must be a list of schemas"),
    ({"a": 3}, "must be a schema"),
    ({"a b": {}}, "the key 'a b' cannot be written"),
    ({"a:b": {}}, "rename it"),
    ({'"a"': {}}, "rename it"),
    ({"": {}}, "rename it"),
    (
        {"a": {"allOf": [an_object({"x": {}}), an_object({"y": {}})]}},
        "additionalProperties beside",
    ),
    ({"a": an_object({"b": {"$ref": "#/properties/a"}}, "b")}, "a: what is required .* itself"),
    ({"a": {"items": {"$ref": "#/properties/a"}, "minItems": 1}}, "a: what is required .* itself"),
    ({"a": {"allOf": [{"items": {}}, {"prefixItems": [{}]}]}}, "two different values"),
    ({"a": {"allOf": [{"pattern": "a"}, {"pattern": "b"}]}}, "pattern has two different values"),
]


@pytest.mark.parametrize(("properties", "why"), REFUSALS)
def test_what_cannot_be_had_exactly_is_refused_by_name(properties, why):
    required = [] if properties.get("a") is not False else ["a"]
    with pytest.raises(UserError, match=f"tool 'f', strict: parameters.*{why}"):
        strict_grammar(an_object(properties, *required))


KEYS = st.sampled_from(
    "type enum const properties required additionalProperties items prefixItems pattern $ref allOf"
    " anyOf oneOf minimum maximum minLength maxLength minItems maxItems minProperties a #".split()
)
STRANGE = st.recursive(
    st.sampled_from(
        [None, True, False, 0, 1, -2, 2.5, "", "a", "#", "#/x", "string", "object", "array", "("]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None, max_examples=300)
@given(st.dictionaries(KEYS, STRANGE, max_size=5))
def test_any_json_is_a_grammar_or_a_users_mistake(schema):
    try:
        grammar = strict_grammar(schema)
    except UserError:
        return
    assert not LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar), GRAMMAR_TOKENIZER)


def test_other_faults_of_tools_name_the_tool():
    with pytest.raises(UserError, match="'a b': a name may have"):
        tool_grammar([tool("a b")], at_least=0, at_most=None)
    with pytest.raises(UserError, match="must be an object's schema"):
        strict_grammar({"type": "string"})
    with pytest.raises(UserError, match="none of the functions"):
        tool_grammar([tool("f")], at_least=1, at_most=1, names=["g"])
    deep: dict[str, Any] = {}
    for _ in range(2000):
        deep = {"type": "array", "items": deep}
    with pytest.raises(UserError, match="nested too deeply"):
        strict_grammar(an_object({"a": deep}))


TOOLS = [
    tool("get-weather", an_object({"city": {"type": "string"}}, "city")),
    tool("module.free", {"type": "object", "uniqueItems": 3}, strict=False),
    tool("nothing"),
]
CALL = '<|tool_call>call:get-weather{city:<|"|>Paris<|"|>}<tool_call|>'
FREE = '<|tool_call>call:module.free{x:[1,{y:<|"|>}<|"|>}],z:null}<tool_call|>'
THOUGHT = "<|channel>thought\nHm {\n<channel|>"


def grammar_of(
    at_least: int, at_most: int | None, thinking: Thinking = "none", **options: Any
) -> str:
    calls = tool_grammar(TOOLS, at_least=at_least, at_most=at_most, **options)
    return after_thought({"calls": {"lark_grammar": calls}}, thinking)


def test_auto_is_free_text_and_known_calls():
    grammar = grammar_of(0, None)
    good = ["", "Hi {", CALL, "I look. " + CALL + FREE, "call:rm{}", FREE]
    assert all(accepts(grammar, text) for text in good)
    bad = ["<|tool_call>call:rm{}<tool_call|>", CALL[:-12], CALL + "more", "Hi<|tool_call>Hi"]
    bad += ["<|tool_call>call:get-weather{}<tool_call|>", "a<|channel>", THOUGHT, "<turn|>x"]
    bad += ["<|tool_call>call:nothing{a:1}<tool_call|>", '<|tool_call>call:module.free{a:<|"|>}']
    assert not any(accepts(grammar, text) for text in bad)


def test_tools_may_be_called_beside_a_structure_of_the_text():
    """Loose ones too: the model decides (vLLM #39929 is the same fault)."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    chat = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS[1:2]}
    given = chat_of_body("chat", chat | {"response_format": form})
    grammar = calls_grammar(given)
    assert grammar is not None and accepts(grammar, FREE) and not accepts(grammar, "")
    whole = rules_for(given, TOKENIZER, "none").grammar
    assert whole is not None and "@calls" in whole and "@text" in whole


def test_vllms_fields_are_of_the_whole_answer_beside_loose_tools():
    """As in vLLM: a test puts a call into the model's mouth by them."""
    chat = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS[1:2]}
    given = chat_of_body("chat", chat | {"structured_outputs": {"regex": "[0-9]+"}})
    assert calls_grammar(given) is None


def test_required_is_nothing_but_calls():
    grammar = grammar_of(1, None)
    assert accepts(grammar, CALL) and accepts(grammar, CALL + FREE + CALL)
    assert not any(accepts(grammar, text) for text in ["", "Hi", "Hi" + CALL, CALL + " "])


def test_one_call_at_most():
    for at_least in (0, 1):
        grammar = grammar_of(at_least, 1)
        assert accepts(grammar, CALL) and not accepts(grammar, CALL + CALL)


def test_only_the_named_functions_may_be_called():
    grammar = grammar_of(1, 1, names={"module.free"})
    assert accepts(grammar, FREE) and not accepts(grammar, CALL)


def test_thoughts_where_they_may_be():
    for at_least, rest in ((0, "Hi"), (0, CALL), (1, CALL)):
        may, opened = (grammar_of(at_least, None, thinking=how) for how in ("may", "open"))
        assert accepts(may, THOUGHT + rest) and accepts(may, rest)
        assert not accepts(may, THOUGHT + THOUGHT + rest)
        assert accepts(opened, "so\n<channel|>" + rest) and not accepts(opened, rest)


@pytest.mark.parametrize("thinking", ["none", "may", "open"])
@pytest.mark.parametrize(("at_least", "at_most"), [(0, None), (0, 1), (1, None), (1, 1), (2, 3)])
def test_walks_are_read_as_what_the_grammar_allows(at_least, at_most, thinking):
    grammar, chance = grammar_of(at_least, at_most, thinking=thinking), random.Random(7)
    walks = [walk(grammar, chance) for _ in range(10)]
    assert sum(ids is not None for ids in walks) > 3
    for ids in filter(None, walks):
        content, reasoning, calls = read(ids, thinking_open=thinking == "open")
        assert at_least <= len(calls) <= (at_most or 99)
        assert not content or at_least == 0
        assert not reasoning or thinking != "none"
        for name, text in calls:
            value = json.loads(text)
            schema = next(t["function"] for t in TOOLS if t["function"]["name"] == name)
            if schema["strict"]:
                jsonschema.validate(value, schema.get("parameters", {"maxProperties": 0}))
