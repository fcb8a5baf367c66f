"""A request's options are honoured or named in a 400: schemas beside json_object, misspelt names,
and required calls with or without `strict`."""

from __future__ import annotations

import json
import logging
from typing import Any

import jsonschema
import pytest

from serve.chat_schema import ChatRequest
from serve.errors import ApiError
from serve.structure import calls_grammar
from tests.support.chats import chat_of_body
from tests.support.serving import Server

ASK: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
ZEBRA = {
    "type": "object",
    "properties": {"zebra": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["zebra"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_object", "schema": ZEBRA}


def test_a_schema_beside_json_object_is_followed(mini_server: Server):
    chat = {"messages": ASK, "response_format": FORMAT}
    flat = {"messages": ASK, "response_format": {**FORMAT, "type": "json_schema", "name": "z"}}
    for body in (chat, flat, {"prompt": "x", "response_format": FORMAT}):
        path = "completions" if "prompt" in body else "chat/completions"
        reply = mini_server.post(path, **body, max_tokens=60, seed=1).json()
        choice = reply["choices"][0]
        jsonschema.validate(json.loads(choice.get("text") or choice["message"]["content"]), ZEBRA)
    body = {"input": ASK, "text": {"format": FORMAT}, "max_output_tokens": 60, "seed": 1}
    reply = mini_server.post("responses", **body).json()
    jsonschema.validate(json.loads(reply["output"][0]["content"][0]["text"]), ZEBRA)


@pytest.mark.parametrize("name", sorted(ChatRequest.model_fields.keys() - {"messages"}))
def test_null_counts_as_absent(name):
    plain = chat_of_body("chat", {"messages": ASK})
    assert chat_of_body("chat", {"messages": ASK, name: None}) == plain


def test_an_error_about_a_tool_is_one_line_whatever_its_names():
    parameters = {"type": "object", "properties": {"a\nb": {"not": {}}}}
    tool = {"name": "f", "strict": True, "parameters": parameters}
    tools = [{"type": "function", "function": tool}]
    with pytest.raises(ApiError) as refusal:
        calls_grammar(chat_of_body("chat", {"messages": ASK, "tools": tools}))
    assert "a\\nb" in refusal.value.message and "\n" not in refusal.value.message


def test_a_schema_that_names_no_type_is_of_an_object_there():
    form = {"type": "json_object", "schema": {"properties": {"a": {}}}}
    chat = chat_of_body("chat", {"messages": ASK, "response_format": form})
    assert chat.structure is not None
    assert chat.structure.json_ == {"type": "object", "properties": {"a": {}}}


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"type": "json_object", "schema": {"not": {}}}, "can't be followed exactly"),
        ({"type": "text", "schema": ZEBRA}, "response_format of type text has no schema"),
        ({**FORMAT, "json_schema": {"schema": ZEBRA}}, "one schema"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused(mini_server: Server, form, words):
    reply = mini_server.post("chat/completions", messages=ASK, response_format=form)
    assert reply.status_code == 400 and words in reply.json()["error"]["message"], reply.text


TOOLS: dict[str, Any] = {
    "chat/completions": [{"type": "function", "function": {"name": "f"}}],
    "responses": [{"type": "function", "name": "f"}],
    "messages": [{"name": "f", "input_schema": {}}],
}
OPENAI_CHOICE = {"type": "function", "function": {"name": "f"}}
SPELT: list[tuple[str, dict[str, Any], str, str]] = [
    ("chat/completions", {"stream": True, "stream_options": {"include_usag": True}},
     "include_usag", "include_usage"),
    ("chat/completions", {"response_format": {"type": "text", "shema": {}}}, "shema", "schema"),
    ("chat/completions", {"response_format": {"type": "json_schema", "json_schema": {
        "schema": {}, "strickt": True}}}, "strickt", "strict"),
    ("chat/completions", {"tool_choice": {**OPENAI_CHOICE, "mod": "auto"}}, "mod", ""),
    ("chat/completions", {"tool_choice": {"type": "function", "function": {
        "name": "f", "nane": 1}}}, "nane", "name"),
    ("chat/completions", {"tool_choice": {"type": "allowed_tools", "allowed_tools": {
        "mode": "auto", "tools": [OPENAI_CHOICE], "tols": 1}}}, "tols", "tools"),
    ("chat/completions", {"prediction": {"type": "content", "content": "", "contents": 1}},
     "contents", "content"),
    ("responses", {"stream": True, "stream_options": {"include_obfuscate": True}},
     "include_obfuscate", "include_obfuscation"),
    ("responses", {"reasoning": {"efort": "low"}}, "efort", "effort"),
    ("responses", {"text": {"formt": {"type": "text"}}}, "formt", "format"),
    ("responses", {"text": {"format": {"type": "text", "strickt": 1}}}, "strickt", "strict"),
    ("responses", {"tool_choice": {"type": "function", "name": "f", "namespaze": "x"}},
     "namespaze", "namespace"),
    ("responses", {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tool": 1,
                                   "tools": [{"type": "function", "name": "f"}]}}, "tool", "tools"),
    ("messages", {"thinking": {"type": "enabled", "budget_token": 1024}},
     "budget_token", "budget_tokens"),
    ("messages", {"tool_choice": {"type": "auto", "disable_parallel_tool_uses": True}},
     "disable_parallel_tool_uses", "disable_parallel_tool_use"),
    ("messages", {"output_format": {"type": "json_schema", "schema": {}, "shema": 1}},
     "shema", "schema"),
]  # fmt: skip


def body_for(path: str, change: dict[str, Any]) -> dict[str, Any]:
    said = {"input": ASK} if path == "responses" else {"messages": ASK}
    limit = {"max_output_tokens" if path == "responses" else "max_tokens": 1}
    return {"model": "mini", "tools": TOOLS[path]} | said | limit | change


@pytest.mark.parametrize(("path", "change", "name", "meant"), SPELT)
def test_a_misspelt_name_in_an_option_is_named(mini_server: Server, path, change, name, meant):
    reply = mini_server.post(path, **body_for(path, change))
    assert reply.status_code == 400, reply.text
    message = reply.json()["error"]["message"]
    (option,) = change.keys() - {"stream"}
    assert f"unknown parameter {name!r} in {option}" in message and "\n" not in message
    assert f"did you mean {meant!r}" in message or not meant


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("chat/completions", {"stream": True, "stream_options": {"x": None}}),
        ("responses", {"reasoning": {"effort": None, "generate_summary": "auto", "mode": "standard",
                                     "context": "all_turns"}, "text": {"verbosity": "low"}}),
        ("messages", {"thinking": {"type": "adaptive", "display": "omitted", "block_binding": {}},
                      "output_config": {"effort": "low", "brand_new": 1}}),
        ("messages", {"messages": [{"role": "user", "made_up": 1, "content": [
            {"type": "text", "text": "x", "made_up": 1}]}]}),
        ("chat/completions", {"messages": [{**ASK[0], "made_up": 1}],
                              "tools": [{**TOOLS["chat/completions"][0], "made_up": 1}]}),
        ("responses", {"input": [{**ASK[0], "made_up": 1}],
                       "tools": [{**TOOLS["responses"][0], "made_up": 1}]}),
    ],
)  # fmt: skip
def test_names_that_ask_for_nothing_and_names_in_messages_are_taken(mini_server, path, change):
    reply = mini_server.post(path, **body_for(path, change))
    assert reply.status_code == 200, reply.text


ADD = {
    "type": "object",
    "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99} for name in "ab"},
    "required": ["a", "b"],
    "additionalProperties": False,
}
DEMANDS = [
    "required",
    {"type": "function", "function": {"name": "add"}},
    {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "required",
            "tools": [{"type": "function", "function": {"name": "add"}}],
        },
    },
]


def tool(parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "parameters": parameters, **more}}


@pytest.mark.parametrize("choice", DEMANDS)
@pytest.mark.parametrize("strict", [{}, {"strict": False}, {"strict": None}, {"strict": True}])
def test_demanded_calls_follow_the_schema_whatever_strict_says(mini_server, choice, strict):
    body = {"messages": ASK, "tools": [tool(ADD, **strict)], "tool_choice": choice, "seed": 2}
    reply = mini_server.post("chat/completions", **body, temperature=1, max_tokens=200)
    calls = reply.json()["choices"][0]["message"]["tool_calls"]
    for call in calls:
        jsonschema.validate(json.loads(call["function"]["arguments"]), ADD)


@pytest.mark.parametrize("strict", [{}, {"strict": False}])
def test_what_cannot_be_followed_stays_free_and_is_logged(mini_server, strict, caplog):
    caplog.set_level(logging.INFO, "specdec.serve")
    free = tool({"type": "object", "not": {"required": ["a"]}}, **strict)
    body = {"messages": ASK, "tools": [free], "tool_choice": "required", "max_tokens": 20}
    reply = mini_server.post("chat/completions", **body)
    assert reply.status_code == 200 and "tool 'add'" in caplog.text and "free" in caplog.text
    body["tools"] = [tool({"type": "object", "not": {"required": ["a"]}}, strict=True)]
    refused = mini_server.post("chat/completions", **body)
    assert refused.status_code == 400 and "not" in refused.json()["error"]["message"]


def test_what_cannot_be_compiled_stays_free_and_is_logged(mini_server, caplog):
    caplog.set_level(logging.INFO, "specdec.serve")
    digits = {"type": "number", "multipleOf": 18.000000000000002}
    huge = {"type": "object", "properties": {"a": digits}}
    body = {"messages": ASK, "tool_choice": "required", "max_tokens": 8}
    reply = mini_server.post("chat/completions", **body, tools=[tool(huge, strict=False)])
    assert reply.status_code == 200 and "arguments stay free" in caplog.text
    refused = mini_server.post("chat/completions", **body, tools=[tool(huge, strict=True)])
    assert refused.status_code == 400


def test_allowed_tools_are_the_only_ones_in_mode_auto_too(mini_server):
    """A grammar by which the model would call the other tool finds no way to begin."""
    other = {"type": "function", "function": {"name": "zap", "parameters": ADD}}
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "add"}}]}
    body = {
        "messages": ASK,
        "tools": [tool(ADD), other],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed},
    }
    chat = chat_of_body("chat", body)
    grammar = calls_grammar(chat)
    assert grammar is not None and '"add"' in grammar and "zap" not in grammar
