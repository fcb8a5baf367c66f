"""The embedded models' chat template writes Gemma 4's forms: turns, thoughts, tools and calls."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from serve.gemma.output import CallArguments, CallBegan, GemmaOutput, Reasoning
from specdec.core.errors import UserError
from targets import mini
from targets.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(mini.path("mini"))
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Which"},
                "Unit": {"type": "string", "enum": ["c", "f"]},
                "tags": {"type": "array", "items": {"type": "string"}},
                "where": {
                    "type": "object",
                    "properties": {"lat": {"type": "number", "nullable": True}},
                    "required": ["lat"],
                },
                "when": {"type": ["string", "null"]},
            },
            "required": ["city"],
        },
    },
}
DECLARED = (
    '<|tool>declaration:get_weather{description:<|"|>Weather of a city<|"|>,parameters:{properties:'
    '{city:{description:<|"|>Which<|"|>,type:<|"|>STRING<|"|>},'
    'tags:{items:{type:<|"|>STRING<|"|>},type:<|"|>ARRAY<|"|>},'
    'Unit:{enum:[<|"|>c<|"|>,<|"|>f<|"|>],type:<|"|>STRING<|"|>},'
    'when:{type:[<|"|>STRING<|"|>,<|"|>NULL<|"|>]},'
    'where:{properties:{lat:{nullable:true,type:<|"|>NUMBER<|"|>}},required:[<|"|>lat<|"|>],'
    'type:<|"|>OBJECT<|"|>}},required:[<|"|>city<|"|>],type:<|"|>OBJECT<|"|>}}<tool|>'
)
PING = {"type": "function", "function": {"name": "ping"}}
PING_DECLARED = '<|tool>declaration:ping{description:<|"|><|"|>}<tool|>'
USER = {"role": "user", "content": "Hi"}
ASKED = "<|turn>user\nHi<turn|>\n"
ANSWER = {"role": "assistant", "content": "Sunny."}
FIRST = {"role": "tool", "tool_call_id": "1", "content": "sunny"}
SECOND = {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "p"}]}
RESULTS = (
    '<|tool_response>response:get_weather{value:<|"|>sunny<|"|>}<tool_response|>'
    '<|tool_response>response:ping{value:<|"|>p<|"|>}<tool_response|>'
)


def calling(**fields: Any) -> dict[str, Any]:
    arguments = {"city": "Paris", "Unit": None, "deep": {"b": [1, 2.5, True], "a": {}}}
    calls = [
        {
            "id": "1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": arguments},
        },
        {"id": "2", "type": "function", "function": {"name": "ping", "arguments": {}}},
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls, **fields}


CALLS = (
    '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,deep:{a:{},b:[1,2.5,true]},Unit:null}'
    "<tool_call|><|tool_call>call:ping{}<tool_call|>"
)


def render(*messages: dict[str, Any], **options: Any) -> str:
    text = TOKENIZER.render(list(messages), **options)
    assert text.startswith("<bos>")
    return text.removeprefix("<bos>")


def test_both_models_have_the_same_template():
    other = load_tokenizer(mini.path("mini-e"))
    assert other.template_fingerprint == TOKENIZER.template_fingerprint


PARTS = st.lists(st.builds(lambda t: {"type": "text", "text": t}, st.text(max_size=9)), max_size=3)
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "model"])
CHATS = st.lists(
    st.fixed_dictionaries({"role": ROLES, "content": PARTS | st.text(max_size=20)}), max_size=5
)


@given(CHATS, st.booleans())
def test_plain_chats_are_turns_of_trimmed_text(messages, prompting):
    """As before there were tools: runs and recorded prompts of 0.1.0 keep their ids."""

    def turn(role: str, content: Any) -> str:
        parts = [content] if isinstance(content, str) else [part["text"] for part in content]
        text = "".join(part.strip() for part in parts)
        return f"<|turn>{'model' if role == 'assistant' else role}\n{text}<turn|>\n"

    expected = "".join(turn(m["role"], m["content"]) for m in messages)
    expected += "<|turn>model\n" if prompting else ""
    assert render(*messages, add_generation_prompt=prompting) == expected


def test_a_plain_chat_letter_by_letter():
    chat = [{"role": "system", "content": " Be brief. "}, USER, ANSWER, USER]
    turns = "<|turn>system\nBe brief.<turn|>\n" + ASKED + "<|turn>model\nSunny.<turn|>\n" + ASKED
    assert render(*chat) == turns + "<|turn>model\n"
    assert render(*chat, add_generation_prompt=False) == turns
    assert render(*chat, enable_thinking=False, tools=None) == turns + "<|turn>model\n"


def test_thinking_and_tools_are_declared_in_the_system_turn():
    system = {"role": "developer", "content": " Be brief. "}
    thinking = "<|turn>system\n<|think|>\n<turn|>\n" + ASKED + "<|turn>model\n"
    assert render(USER, enable_thinking=True) == thinking
    tools = render(USER, tools=[WEATHER, PING])
    assert tools == f"<|turn>system\n{DECLARED}{PING_DECLARED}<turn|>\n{ASKED}<|turn>model\n"
    both = render(system, USER, tools=[WEATHER], enable_thinking=True)
    head = f"<|turn>system\n<|think|>\nBe brief.{DECLARED}<turn|>\n"
    assert both == f"{head}{ASKED}<|turn>model\n"


def test_calls_results_and_the_answer_are_one_turn():
    calls, chat = calling(), ASKED + "<|turn>model\n" + CALLS + RESULTS
    assert render(USER, calls, FIRST, SECOND) == chat
    assert render(USER, calls, FIRST, SECOND, ANSWER, USER) == (
        chat + "Sunny.<turn|>\n" + ASKED + "<|turn>model\n"
    )
    again = render(USER, calls, FIRST, SECOND, calls, FIRST, SECOND)
    assert again == chat + CALLS + RESULTS
    assert render(USER, calls, FIRST, SECOND, USER) == (
        chat + "<turn|>\n" + ASKED + "<|turn>model\n"
    )


def test_text_beside_calls_follows_the_results_as_gemma_has_it():
    calls, chat = calling(content=" I look. "), ASKED + "<|turn>model\n" + CALLS + RESULTS
    assert render(USER, calls, FIRST, SECOND, ANSWER) == (
        chat + "I look.Sunny.<turn|>\n<|turn>model\n"
    )
    assert render(USER, calls, FIRST, SECOND) == chat + "I look.<turn|>\n<|turn>model\n"


def test_unanswered_calls_wait_for_results():
    waiting = ASKED + "<|turn>model\n" + CALLS + "<|tool_response>"
    assert render(USER, calling()) == waiting
    assert render(USER, calling(content="")) == waiting


def test_results_may_be_objects_and_unknown():
    strange = {"role": "tool", "tool_call_id": "9", "name": "other", "content": {"b": 1, "a": "x"}}
    text = render(USER, calling(), strange)
    assert text.endswith('<|tool_response>response:other{a:<|"|>x<|"|>,b:1}<tool_response|>')


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thoughts_are_kept_after_the_last_user_message(name):
    thinking = calling(**{name: "Hm."})
    thought = "<|channel>thought\nHm.\n<channel|>"
    head = "<|turn>system\n<|think|>\n<turn|>\n" + ASKED + "<|turn>model\n"
    running = render(USER, thinking, FIRST, SECOND, enable_thinking=True)
    assert running == head + thought + CALLS + RESULTS + "<|channel>thought\n"
    old = render(USER, thinking, FIRST, SECOND, USER, enable_thinking=True)
    assert "Hm." not in old
    kept = render(USER, thinking, FIRST, SECOND, USER, preserve_thinking=True)
    assert thought in kept


def test_thoughts_within_an_answers_text_are_left_out():
    answer = {"role": "assistant", "content": "<|channel>thought\nHm.\n<channel|> Sunny."}
    assert render(USER, answer) == ASKED + "<|turn>model\nSunny.<turn|>\n<|turn>model\n"


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([USER, FIRST], "must follow the tool call"),
        ([USER, ANSWER, FIRST], "must follow the tool call"),
        ([{"role": "robot", "content": "x"}], "unknown role: robot"),
        (
            [USER, {**ANSWER, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
            "must be an object",
        ),
    ],
)
def test_what_gemma_has_no_form_for_is_refused(messages, why):
    with pytest.raises(UserError, match=why):
        render(*messages)


def test_what_the_template_writes_is_what_the_server_reads():
    """A thought and a call that were generated, rendered as history, are read as they were."""
    text = render(calling(reasoning="Hm.\n\nSo."), add_generation_prompt=False)
    ids = TOKENIZER.encode(text.removeprefix("<|turn>model\n"))[1:]
    output = GemmaOutput(TOKENIZER, tools=True)
    parts = [part for token in ids for part in output.feed(token)] + output.finish()
    assert "".join(p.text for p in parts if isinstance(p, Reasoning)) == "Hm.\n\nSo."
    assert [p.name for p in parts if isinstance(p, CallBegan)] == ["get_weather", "ping"]
    first = "".join(p.text for p in parts if isinstance(p, CallArguments) and p.index == 0)
    assert first == '{"city":"Paris","deep":{"a":{},"b":[1,2.5,true]},"Unit":null}'
