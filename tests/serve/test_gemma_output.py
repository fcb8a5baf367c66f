"""Gemma 4's output comes apart into answer, reasoning and calls, however it was cut into tokens."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from serve.gemma.arguments import DEEPEST, ArgumentsToJson
from serve.gemma.output import CallArguments, CallBegan, Content, GemmaOutput, Part, Reasoning
from serve.stream import with_unopened_thoughts
from targets.mini import path
from targets.tokenizer import load_tokenizer
from tests.serve.gemma_syntax import gemma_value
from tests.support.fakes_text import ALPHABET, CharTokenizer

TOKENIZER = load_tokenizer(path("mini"))
MARKERS = ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>']
MARKERS += ["<|tool_response>", "<turn|>", "<|think|>", "<pad>"]
ANY_MARKER = re.compile("(" + "|".join(map(re.escape, MARKERS)) + ")")


@dataclass
class Taken:
    """All parts of one output, put together."""

    content: str = ""
    reasoning: str = ""
    names: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)

    def add(self, parts: list[Part]) -> None:
        for part in parts:
            match part:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallBegan(index, name):
                    assert index == len(self.names)
                    self.names.append(name)
                    self.arguments.append("")
                case CallArguments(index, text):
                    assert text and index == len(self.names) - 1
                    self.arguments[index] += text

    @property
    def values(self) -> list[dict]:
        return [json.loads(text) for text in self.arguments]


def ids_of(text: str, cut: int = 10**9) -> list[int]:
    """Tokens of `text`; ordinary text is cut every `cut` characters before it is encoded."""
    ids: list[int] = []
    for stretch in ANY_MARKER.split(text):
        step = len(stretch) if stretch in MARKERS else cut
        for start in range(0, len(stretch), max(step, 1)):
            ids += TOKENIZER.encode(stretch[start : start + step])[1:]
    return ids


def taken(ids: list[int], *, complete: bool = True, **options: Any) -> Taken:
    output, result = GemmaOutput(TOKENIZER, **{"tools": True, **options}), Taken()
    for token in ids:
        result.add(output.feed(token))
    result.add(output.finish(complete))
    assert output.calls == len(result.names)
    return result


def read(text: str, **options: Any) -> Taken:
    """What `text` holds: the same for every way to cut it into tokens."""
    whole = taken(ids_of(text), **options)
    for cut in range(1, 9):
        assert taken(ids_of(text, cut), **options) == whole
    return whole


def arguments_of(text: str) -> dict:
    found = read(f"<|tool_call>call:f{{{text}}}<tool_call|>")
    assert found.names == ["f"] and found.content == found.reasoning == ""
    return found.values[0]


# Inputs and expectations of vLLM's tests of its parser (tests/tool_parsers/
# test_gemma4_tool_parser.py): facts about the format.
VLLM_ARGUMENTS = [
    ("", {}),
    ("   ", {}),
    ('location:<|"|>Paris<|"|>', {"location": "Paris"}),
    ('location:<|"|>Paris, France<|"|>', {"location": "Paris, France"}),
    (
        'location:<|"|>San Francisco<|"|>,unit:<|"|>celsius<|"|>',
        {"location": "San Francisco", "unit": "celsius"},
    ),
    ("count:42", {"count": 42}),
    ("score:3.14", {"score": 3.14}),
    ("flag:true", {"flag": True}),
    ("flag:false", {"flag": False}),
    ("param:null", {"param": None}),
    (
        'name:<|"|>test<|"|>,count:42,active:true,score:3.14',
        {"name": "test", "count": 42, "active": True, "score": 3.14},
    ),
    ('nested:{inner:<|"|>value<|"|>}', {"nested": {"inner": "value"}}),
    ('record_map:{<|"|>3<|"|>:<|"|>new text<|"|>}', {"record_map": {"3": "new text"}}),
    (
        'outer:{inner:{<|"|>3<|"|>:<|"|>new text<|"|>}}',
        {"outer": {"inner": {"3": "new text"}}},
    ),
    ('items:[<|"|>a<|"|>,<|"|>b<|"|>]', {"items": ["a", "b"]}),
    ("key:", {"key": ""}),
    ("left:108.,right:22.8", {"left": 108.0, "right": 22.8}),
    ("a:[]", {"a": []}),
    ("a:[42,true,3.14]", {"a": [42, True, 3.14]}),
    (
        'a:[[<|"|>a]b<|"|>,<|"|>c<|"|>],<|"|>tail<|"|>]',
        {"a": [["a]b", "c"], "tail"]},
    ),
    ("a:[42,]trailing", {"a": [42]}),
    ("input:{all:true}", {"input": {"all": True}}),
    (
        'nested:{inner:<|"|>value<|"|>},list:[<|"|>a<|"|>,<|"|>b<|"|>]',
        {"nested": {"inner": "value"}, "list": ["a", "b"]},
    ),
    (
        'path:<|"|>index.html<|"|>,content:<|"|><!DOCTYPE html>\n<html lang="zh-CN">\n<head>\n'
        '    <meta charset="UTF-8">\n<|"|>',
        {
            "path": "index.html",
            "content": '<!DOCTYPE html>\n<html lang="zh-CN">\n<head>\n    <meta charset="UTF-8">\n',
        },
    ),
    (
        'file_path:<|"|>src/env.py<|"|>,old_string:<|"|>old_val<|"|>,new_string:<|"|>new_val<|"|>'
        ",replace_all:false",
        {
            "file_path": "src/env.py",
            "old_string": "old_val",
            "new_string": "new_val",
            "replace_all": False,
        },
    ),
]

OURS = [
    ("n:-0", {"n": 0}),
    ("n:1e5,m:-2.5E-3", {"n": 1e5, "m": -2.5e-3}),
    ("n:" + "9" * 400, {"n": "9" * 400}),
    ("n:1e999", {"n": "1e999"}),
    ("a:None,b:nil,c:NULL", {"a": None, "b": None, "c": None}),
    ("unit: celsius per day ,n: 3 ", {"unit": "celsius per day", "n": 3}),
    ('a : <|"|> x <|"|> , b:1', {"a": " x ", "b": 1}),
    ('s:<|"|>{"a": [1, 2}<|"|>', {"s": '{"a": [1, 2}'}),
    ('s:<|"|><|"|>', {"s": ""}),
    ("o:{},a:[[],{}]", {"o": {}, "a": [[], {}]}),
    ("a:1,,b:2,", {"a": 1, "b": 2}),
    ("a:,b:2", {"a": "", "b": 2}),
    ("stray,b:2", {"b": 2}),
    ('a:<|"|>x<|"|>b:2', {"a": "x", "b": 2}),
    ('a:x<|"|>y<|"|>', {"a": "xy"}),
    ("a:[1,2", {"a": [1, 2]}),
    ("a:{b:[1,{c:2", {"a": {"b": [1, {"c": 2}]}}),
    ('a:<|"|>cut', {"a": "cut}"}),
    ("a:1,a:2", {"a": 2}),
    ("a:1}} and more", {"a": 1}),
    (":[t:[]", {"": ["t:["]}),
    ('<|"|>a b<|"|>:1,<|"|>lost<|"|>,<|"|>c<|"|> : 2', {"a b": 1, "c": 2}),
]


@pytest.mark.parametrize(("text", "value"), VLLM_ARGUMENTS)
def test_arguments_that_vllm_reads_are_read_alike(text, value):
    assert arguments_of(text) == value


@pytest.mark.parametrize(("text", "value"), OURS)
def test_other_and_broken_arguments_are_read_on(text, value):
    assert arguments_of(text) == value


def test_what_is_no_json_number_is_text():
    texts = {"zip": "007", "plus": "+5", "nan": "NaN", "inf": "Infinity", "dot": ".5"}
    assert arguments_of(",".join(f"{k}:{v}" for k, v in texts.items())) == texts


def test_any_character_may_stand_in_a_string():
    text = 'tab\t"quote" back\\slash \u00e9\u4e16\U0001f600\x00\x7f\u2028 }]{[,: <| |> <|"'
    assert arguments_of(f's:<|"|>{text}<|"|>') == {"s": text}


def test_brackets_beyond_the_deepest_are_text():
    value, depth = arguments_of("a:" + "[" * 500)["a"], 1
    while isinstance(value, list):
        (value,), depth = value, depth + 1
    assert depth == DEEPEST and value == "[" * (500 - DEEPEST + 1)


def test_several_calls_follow_each_other():
    found = read(
        'Let me check. <|tool_call>call:get_weather{location:<|"|>London<|"|>}<tool_call|>'
        "<|tool_call>call:get-time{}<tool_call|><|tool_call>call:module.f{n:1}<tool_call|>"
        "<|tool_response>"
    )
    assert found.content == "Let me check. " and found.reasoning == ""
    assert found.names == ["get_weather", "get-time", "module.f"]
    assert found.values == [{"location": "London"}, {}, {"n": 1}]


def test_text_after_a_call_is_content():
    found = read('<|tool_call>call:get_weather{location:<|"|>Paris<|"|>}<tool_call|><div>')
    assert found.content == "<div>" and found.values == [{"location": "Paris"}]


@pytest.mark.parametrize("end", ["<turn|>", "<|tool_response>", "", "<|tool_call>"])
def test_a_call_without_its_end_is_closed_by_the_turns_end(end):
    found = read('<|tool_call>call:f{a:{b:[<|"|>London' + end)
    assert found.names == ["f"] and found.values == [{"a": {"b": ["London"]}}]


def test_a_call_cut_by_max_tokens_stays_cut():
    found = read('<|tool_call>call:f{a:<|"|>Lon<|"|>,n:4', complete=False)
    assert found.arguments == ['{"a":"Lon","n":']


@pytest.mark.parametrize("header", ["call:{a:1}", "call", "f{a:1}", "", "call:f g{}", "call:f"])
def test_what_is_no_call_is_content(header):
    found = read(f"<|tool_call>{header}<tool_call|> then")
    assert (found.content, found.names) == (f"{header} then", [])


def test_without_tools_a_call_is_content():
    found = read('<|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|>.', tools=False)
    assert (found.content, found.names) == ("call:f{a:x}.", [])


def test_a_thought_is_reasoning_and_its_name_is_not():
    found = read("<|channel>thought\nHm {\nso.\n<channel|>\nThe answer")
    assert (found.reasoning, found.content) == ("Hm {\nso.", "\nThe answer")


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<|channel>thought\n<channel|>Hi", "", "Hi"),
        ("<|channel>thought<channel|>Hi", "", "Hi"),
        ("<|channel><channel|>Hi", "", "Hi"),
        ("<|channel>analysis\nSo<channel|>Hi", "So", "Hi"),
        ("<|channel>No name here\nSo<channel|>Hi", "No name here\nSo", "Hi"),
        ("<|channel>thought\nopen", "open", ""),
        ("<|channel>thought\na<|channel>thought\nb<channel|>c", "ab", "c"),
        ("a<channel|>b", "", "ab"),
        ('<|channel>thought\ncall <|"|>x<|"|><turn|>y', "call x", "y"),
    ],
)
def test_channels(text, reasoning, content):
    found = read(text)
    assert (found.reasoning, found.content) == (reasoning, content)


def test_a_call_ends_a_thought():
    found = read("<|channel>thought\nI call.<|tool_call>call:f{a:1}<tool_call|>")
    assert (found.reasoning, found.content, found.values) == ("I call.", "", [{"a": 1}])


def test_a_prompt_may_end_inside_a_thought():
    found = read("still\n<channel|>Hi", thinking_open=True)
    assert (found.reasoning, found.content) == ("still", "Hi")


def test_reasoning_tokens_lie_between_the_markers():
    name, thought, answer = ids_of("thought\n"), ids_of("so it is"), ids_of("Hi")
    begin, end = ids_of("<|channel><channel|>")
    output = GemmaOutput(TOKENIZER, tools=True)
    inside = []
    for token in [begin, *name, *thought, end, *answer]:
        output.feed(token)
        inside.append(output.in_reasoning)
    assert output.reasoning_tokens == len(name) + len(thought)
    assert sum(inside) == 1 + len(name) + len(thought)


def test_half_a_character_is_flushed_at_a_marker():
    whole = ids_of("\U0001f600")
    assert len(whole) > 1
    found = taken([*whole[:-1], *ids_of("<|channel>thought\n"), *whole])
    assert found.content.strip("\ufffd") == "" and found.content
    assert found.reasoning == "\U0001f600"


def test_a_vocabulary_without_markers_has_only_content():
    class Plain(CharTokenizer):
        def token_id(self, token: str) -> int | None:
            return None

    output = GemmaOutput(Plain(), tools=True)
    ids = range(2, len(ALPHABET))
    text = "".join(part.text for i in ids for part in output.feed(i) if isinstance(part, Content))
    assert text == ALPHABET[2:] and output.finish() == []


# What Gemma writes where it falls back to JSON or Python.
QUOTED = [
    ('"a": "x, {y}", "b": {"c": ["d", 2]}', {"a": "x, {y}", "b": {"c": ["d", 2]}}),
    ("'a': 'x, {y}', 'b': [True, False, None]", {"a": "x, {y}", "b": [True, False, None]}),
    ("a:\"x\",b:'y'", {"a": "x", "b": "y"}),
    ('"a" : "x" , "b" :1', {"a": "x", "b": 1}),
    ("\"a\": \"\", 'b': ''", {"a": "", "b": ""}),
    (r'"a": "line\n\"said\"\t\u00e9\ud83d\ude00\\"', {"a": 'line\n"said"\té\U0001f600\\'}),
    (r"'a': 'it\'s'", {"a": "it's"}),
    ("'a': \"it's\"", {"a": "it's"}),
    ("'a': 'it's, well, so'", {"a": "it's, well, so"}),
    ('"a": "say "hi" now", "b": 1', {"a": 'say "hi" now', "b": 1}),
    ('"a": "{"k": 1}"', {"a": '{"k": 1}'}),
    ('"a": "two\nlines"', {"a": "two\nlines"}),
    ('"a":<|"|>x<|"|>,<|"|>b<|"|>:"y"', {"a": "x", "b": "y"}),
    ('"a": ["x", \'y, z\', <|"|>w<|"|>]', {"a": ["x", "y, z", "w"]}),
    ('"a-b c": 1', {"a-b c": 1}),
    ('"a", "b": 1', {"b": 1}),
    ("a:'tis so,b:2", {"a": "'tis so", "b": 2}),
    ('a:"half,b:2', {"a": '"half', "b": 2}),
    ('a:5" pipe,b:2', {"a": '5" pipe', "b": 2}),
    ('a:"x" and more,b:2', {"a": '"x" and more', "b": 2}),
    ('a:"x <|"|>y<|"|>,b:2', {"a": '"x y', "b": 2}),
    ('a:["x,"y,"z],b:w', {"a": ['"x', '"y', '"z'], "b": "w"}),
    ("a:True,b:False,c:true", {"a": True, "b": False, "c": True}),
    ("a=1,b='x'", {"a": 1, "b": "x"}),
]


@pytest.mark.parametrize(("text", "value"), QUOTED)
def test_quotes_of_json_and_python_are_read(text, value):
    assert arguments_of(text) == value


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("f(a=1)", {"a": 1}),
        ("f()", {}),
        ("f( )", {}),
        ("f(a='x, y', b=[1, 'z'], c={'k': (1, 2)}, d=True)",
         {"a": "x, y", "b": [1, "z"], "c": {"k": [1, 2]}, "d": True}),
        ('f(a="(x)", b=<|"|>y)<|"|>)', {"a": "(x)", "b": "y)"}),
        ("f(city=Paris (France), n=2)", {"city": "Paris (France)", "n": 2}),
        ("f(a: 1)", {"a": 1}),
        ('f({"a": 1})', {"a": 1}),
        ('f({a:<|"|>x<|"|>})', {"a": "x"}),
    ],
)  # fmt: skip
def test_calls_as_python_writes_them_are_read(written, value):
    found = read(f"<|tool_call>call:{written}<tool_call|>then")
    assert (found.names, found.values, found.content) == (["f"], [value], "then")


@pytest.mark.parametrize("written", ['f("x")', "f(1, a=2)", 'f(<|"|>x<|"|>)', "f(x)"])
def test_calls_whose_arguments_have_no_names_are_content(written):
    found = read(f"<|tool_call>call:{written}<tool_call|>")
    assert found.names == [] and "call:f(" in found.content


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("f", "f"),
        ("server:f", "f"),
        ("a:b:f", "f"),
        ("server.f", "f"),
        ("mcp__web:search", "mcp__web.search"),
        ("mcp__web.search", "mcp__web.search"),
        ("web:read", "mcp__files.read"),
        ("read", "mcp__files.read"),
        ("search", "search"),
        ("other", "other"),
        ("module.other", "module.other"),
    ],
)
def test_the_last_part_of_a_name_names_a_tool_that_was_offered(written, name):
    names = ["f", "search", "mcp__web.search", "mcp__files.search", "mcp__files.read"]
    found = read(f'<|tool_call>call:{written}{{a:<|"|>x<|"|>}}<tool_call|>', names=names)
    assert (found.names, found.values) == ([name], [{"a": "x"}])


def test_a_name_of_several_parts_that_names_nothing_is_content():
    found = read("<|tool_call>call:server:g{a:1}<tool_call|>", names=["f"])
    assert (found.names, found.content) == ([], "call:server:g{a:1}")


@pytest.mark.parametrize(
    ("text", "thought", "content"),
    [
        ("They ask.\n<channel|>Four.", "They ask.", "Four."),
        ("thought\nThey ask.\n<channel|>Four.", "They ask.", "Four."),
        ("thought <channel|>Four.", "", "Four."),
        ("thought it over<channel|>Four.", "thought it over", "Four."),
        ("<channel|>Four.", "", "Four."),
        ("Four.", "", "Four."),
        ("<|channel>thought\na<channel|>b<channel|>c", "ab", "c"),
        ("x<|tool_call>call:f{}<tool_call|>y<channel|>z", "y", "xz"),
    ],
)
def test_a_whole_answers_thought_needs_no_beginning(text, thought, content):
    output, parts = GemmaOutput(TOKENIZER, tools=True), []
    for token in ids_of(text):
        parts += output.feed(token)
    found = Taken()
    found.add(list(with_unopened_thoughts([*parts, *output.finish()])))
    assert (found.reasoning, found.content) == (thought, content)


def test_many_quotes_without_pairs_are_read_in_time_that_grows_with_the_text():
    """Each would search the whole rest for its pair."""
    reader = ArgumentsToJson()
    text = "a:[" + "\"x,'y," * 30_000
    assert len(json.loads(reader.text(text) + reader.finish())["a"]) == 60_000


SYNTAX = [i for c in "{}[]():,.-0123456789 \n\"'\\=" for i in ids_of(c)]
WORDS = ids_of("call:f{ true false null None a") + ids_of("call:") + ids_of("thought\n")
CONTROL = [i for m in MARKERS for i in ids_of(m)]
TOKENS = st.one_of(
    st.sampled_from(SYNTAX),
    st.sampled_from(WORDS),
    st.sampled_from(CONTROL),
    st.integers(0, TOKENIZER.vocab_size - 1),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(TOKENS, max_size=80), st.booleans())
def test_any_tokens_give_whole_json(ids, begun):
    prefix = ids_of("<|tool_call>call:f{") if begun else []
    found = taken([*prefix, *ids])
    assert all(isinstance(value, dict) for value in found.values)
    json.dumps(found.values, allow_nan=False)
    plain = ANY_MARKER.search(TOKENIZER.decode(ids))  # ordinary tokens may happen to spell one
    for text in (found.content, found.reasoning, *found.names, *found.arguments):
        assert plain or not ANY_MARKER.search(text)


KEYS = st.from_regex(r"[a-zA-Z_][\w\-]{0,6}", fullmatch=True)
# Text that holds no marker of its own: encoding it would make the marker's token of it.
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<|")).filter(
    lambda text: "\ufffd" not in text
)
NUMBERS = st.integers(-(10**12), 10**12) | st.floats(-1e9, 1e9, allow_nan=False)
LEAVES = st.none() | st.booleans() | NUMBERS | TEXTS
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(KEYS, VALUES, max_size=4), st.integers(1, 8))
def test_what_is_written_in_gemmas_syntax_is_read_back(value, cut):
    text = f"<|tool_call>call:f{gemma_value(value)}<tool_call|>"
    assert taken(ids_of(text, cut)).values == [value]
