"""OpenAI's Responses API over HTTP, as its SDK and Codex use it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from serve.responses.schema import ResponsesRequest
from serve.responses.thoughts import opened, sealed
from serve.responses.translate import chat_of
from serve.schema import parse
from tests.support.serving import SAID, ServedTarget, Server, events_of, scripted, serving
from tests.support.templates import WITH_TOOLS

ASK = "What is 2 + 3?"
ADD = {
    "type": "object",
    "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99} for name in "ab"},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "add", "description": "Sums", "parameters": ADD}
NAMED = {"type": "function", "name": "add"}
FREE: Any = [{"type": "function", "name": name, "parameters": {}} for name in ("edit", "run")]
FOREIGN: Any = [
    {"type": "web_search"},
    {"type": "namespace", "name": "multi_agent_v1", "tools": [TOOL]},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
]
CODEX = {
    "model": "mini",
    "stream": True,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a204c1",
    "client_metadata": {"originator": "codex_exec"},
    "instructions": "Be brief.",
    "tools": [*FREE, *FOREIGN],
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": ASK}]},
    ],
}
"""Codex's twelve fields (0.169.0), and its kinds of tools."""


def test_it_says_what_the_chat_says(mini_server):
    """The same model, chat and seed by either API, whole and streamed, several at once."""
    wish = {"temperature": 1.0, "top_p": 0.9}
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASK}]

    def of_chat(seed: int) -> str:
        body = {"messages": chat, "seed": seed, "max_tokens": 12, **wish}
        reply = mini_server.post("chat/completions", **body)
        return reply.json()["choices"][0]["message"]["content"]

    def of_responses(seed: int) -> tuple[str, str]:
        ask: Any = {"model": "mini", "instructions": "Be brief.", "input": ASK, **wish}
        ask |= {"max_output_tokens": 12, "extra_body": {"seed": seed}}
        whole = mini_server.openai.responses.create(**ask)
        stream = mini_server.openai.responses.create(**ask, stream=True)
        *_, last = stream
        assert whole.status == "incomplete" and last.type == "response.incomplete"
        assert whole.incomplete_details.reason == "max_output_tokens"
        assert last.response.usage == whole.usage and whole.usage.output_tokens == 12
        assert whole.temperature == 1.0 and whole.top_p == 0.9
        return last.response.output_text, whole.output_text

    expected = [of_chat(seed) for seed in range(3)]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(of_responses, range(3))) == [(text, text) for text in expected]


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "add"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "add"}],
        },
    ],
)
def test_demanded_calls_are_valid(mini_server, choice):
    response = mini_server.openai.responses.create(
        model="mini",
        input=ASK,
        tools=[TOOL, *FOREIGN],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_output_tokens=100,
        extra_body={"seed": 1},
    )
    (call,) = response.output
    assert (call.type, call.name, response.status) == ("function_call", "add", "completed")
    assert all(0 <= json.loads(call.arguments)[name] <= 99 for name in "ab")
    assert [tool.name for tool in response.tools] == ["add", "multi_agent_v1"]


class Sum(pydantic.BaseModel):
    kind: Literal["sum", "product"]
    left: Literal[1, 2, 3]


def test_parse_gives_a_pydantic_object(mini_server):
    ask: Any = {"model": "mini", "input": ASK, "text_format": Sum, "extra_body": {"seed": 3}}
    response = mini_server.openai.responses.parse(**ask)
    assert isinstance(response.output_parsed, Sum)
    with mini_server.openai.responses.stream(**ask) as stream:
        streamed = stream.get_final_response()
    assert streamed.output_parsed == response.output_parsed


ENDS = {"reasoning_text": "text", "output_text": "text", "function_call_arguments": "arguments"}
PART = ["response.content_part.added", "response.{}.delta", "response.{}.done"]
WORDED = [
    "response.output_item.added",
    *PART,
    "response.content_part.done",
    "response.output_item.done",
]
CALLED = [
    "response.output_item.added",
    "response.{}.delta",
    "response.{}.done",
    "response.output_item.done",
]


def test_events_of_a_stream_are_all_there_in_order():
    """Each is needed: without any one of them this list is another."""
    with scripted(SAID) as server:
        events = events_of(server.post("responses", **CODEX))
        whole = server.post("responses", **CODEX | {"stream": False}).json()
    assert [held["sequence_number"] for _, held in events] == list(range(len(events)))
    names = [name for name, _ in events]
    call = [name.format("function_call_arguments") for name in CALLED]
    assert [name for i, name in enumerate(names) if names[i - 1 : i] != [name]] == [
        "response.created",
        "response.in_progress",
        *(name.format("reasoning_text") for name in WORDED),
        *(name.format("output_text") for name in WORDED),
        *(call * 2),
        "response.completed",
    ]
    for _, held in events:  # as OpenAI's own types have them
        pydantic.TypeAdapter(ResponseStreamEvent).validate_python(held)
    items: list[dict[str, Any]] = []
    text = ""
    for name, held in events:
        kind, _, what = name.removeprefix("response.").partition(".")
        if name == "response.output_item.added":
            assert held["output_index"] == len(items) and held["item"]["status"] == "in_progress"
            items.append(held["item"])
            text = ""
        elif what == "delta":
            assert held["item_id"] == items[-1]["id"]
            text += held["delta"]
        elif kind in ENDS and what == "done":
            assert held[ENDS[kind]] == text != "" and held["item_id"] == items[-1]["id"]
        elif name == "response.content_part.done":
            assert held["part"]["text"] == text
        elif name == "response.output_item.done":
            assert held["item"]["id"] == items[-1]["id"]
            items[-1] = held["item"]
    assert [{**item, "id": 0, "call_id": 0} for item in items] == [
        {**item, "id": 0, "call_id": 0} for item in whole["output"]
    ]
    first, last = events[0][1]["response"], events[-1][1]["response"]
    assert (first["status"], last["status"]) == ("in_progress", "completed")
    assert last["output"] == items and last["usage"] == whole["usage"]
    assert first["id"] == last["id"] and first["output"] == []


def test_a_whole_response_is_openais():
    with scripted(SAID) as server:
        whole = server.post("responses", **CODEX | {"stream": False}).json()
    Response.model_validate(whole, strict=False)
    thought, text, edit, run = whole["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "I must call {it}."}]
    assert opened(thought["encrypted_content"]) == "I must call {it}."
    assert text["content"][0]["text"] == "Let me see.\n"
    assert json.loads(edit["arguments"]) == {"path": "a.py", "new": 'x = {"a": [1]}\n', "line": 4}
    assert (run["name"], run["arguments"]) == ("run", "{}") and run["call_id"] != edit["call_id"]
    usage = whole["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]


@pytest.mark.parametrize("template", WITH_TOOLS)
def test_an_agent_sends_back_what_it_got(template):
    """Items of an answer, with the tool's output, are the next request's input."""
    call = "<|channel>thought\nSum it.\n<channel|>Well.<|tool_call>call:add{a:2,b:3}<tool_call|>"
    with scripted(f"{call}<|tool_response>", then="It is 5.", template=template) as server:
        create = server.openai.responses.create
        first = create(model="mini", input=ASK, tools=[TOOL], reasoning={"effort": "high"})
        given: Any = [{"role": "user", "content": ASK}, *(i.to_dict() for i in first.output)]
        (asked,) = [item for item in first.output if item.type == "function_call"]
        said = {"type": "function_call_output", "call_id": asked.call_id, "output": "5"}
        last = create(model="mini", input=[*given, said], tools=[TOOL])
    assert last.output_text == "It is 5." and last.status == "completed"


def test_tools_that_come_later_are_offered_too():
    own = {"type": "function", "name": "first"}
    later = {"type": "additional_tools", "role": "developer", "tools": [TOOL, {"type": "custom"}]}
    given = [{"role": "user", "content": "a"}, later, {"role": "user", "content": "b"}]
    chat = chat_of(parse(ResponsesRequest, json.dumps({"input": given, "tools": [own]}).encode()))
    assert [tool.function.name for tool in chat.tools or ()] == ["first", TOOL["name"]]
    assert [message.role for message in chat.messages] == ["user", "user"]


def test_a_namespace_without_a_description_has_an_empty_one():
    space = {"type": "namespace", "name": "n", "description": None, "tools": [TOOL]}
    (read,) = parse(ResponsesRequest, json.dumps({"input": "a", "tools": [space]}).encode()).tools
    assert read.description == ""


def test_a_newer_items_own_role_is_kept():
    given = [{"type": "newer", "role": "developer", "note": "Be brief."}]
    wire = {"input": [*given, {"role": "user", "content": "b"}]}
    chat = chat_of(parse(ResponsesRequest, json.dumps(wire).encode()))
    assert chat.messages[0].role in ("system", "developer")


def test_thoughts_in_a_row_are_one():
    thoughts = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}
        for text in ("First.", "Then.")
    ]
    given = [{"role": "user", "content": "a"}, *thoughts, {"role": "assistant", "content": "b"}]
    wire = parse(ResponsesRequest, json.dumps({"input": [*given, given[0]]}).encode())
    assert chat_of(wire).messages[1].for_template()["reasoning_content"] == "First.\nThen."


def test_a_history_means_the_chat_it_was():
    thought = {"type": "reasoning", "summary": [], "encrypted_content": sealed("Hm.")}
    text = [{"type": "output_text", "text": "Both.", "annotations": []}]
    history = [
        *CODEX["input"],
        {"id": "rs_1", **thought},
        {"type": "message", "id": "msg_1", "role": "assistant", "content": text},
        {"type": "function_call", "call_id": "c1", "name": "run", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "edit", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "fine"},
        {"type": "function_call_output", "call_id": "c2", "output": text},
        {"type": "reasoning", "summary": [], "encrypted_content": "another server's"},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "And now?"},
    ]
    wire = parse(ResponsesRequest, json.dumps(CODEX | {"input": history}).encode())
    chat = chat_of(wire)
    told = [message.for_template() for message in chat.messages]
    assert [message["role"] for message in told] == [
        "system",
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "user",
    ]
    said = told[3]
    assert (said["content"], said["reasoning"]) == ("Both.", "Hm.")
    assert [call["function"]["name"] for call in said["tool_calls"]] == ["run", "edit"]
    assert said["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert told[4] == {"role": "tool", "content": "fine", "tool_call_id": "c1"}
    assert told[5]["content"] == "Both." and told[6] == {"role": "assistant", "content": "Done."}
    names = [tool.function.name for tool in chat.tools or ()]
    assert names == ["edit", "run", "multi_agent_v1.add"]
    assert chat.thinks is True and chat.parallel_tool_calls is True


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input": []}, ["input"]),
        ({"input": None}, ["input"]),
        ({"input": [{"type": "item_reference", "id": "x"}]}, ["item_reference", "keeps no items"]),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, ["input_image"]),
        ({"previous_response_id": "resp_1"}, ["keeps no responses", "whole conversation"]),
        ({"conversation": "conv_1"}, ["conversation"]),
        ({"background": True}, ["background"]),
        ({"truncation": "auto"}, ["truncation"]),
        ({"max_tokens": 5}, ["max_output_tokens"]),
        ({"max_output_tokens": 0}, ["max_output_tokens"]),
        ({"tools": [{"type": "function", "name": "a b"}]}, ["name"]),
        ({"tools": FOREIGN[::2], "tool_choice": "required"}, ["tool_choice", "tools"]),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, ["tool_choice", "function"]),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, ["'x'"]),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, ["schema"]),
        ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, ["not"]),
        ({"include": ["message.output_text.logprobs"]}, ["include", "log-prob"]),
        ({"reasoning": {"effort": "wild"}}, ["effort"]),
        ({"brand_new": 1}, ["brand_new"]),
        ({"stream": None, "stream_options": {}}, ["stream_options"]),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            ["stream_options", "continuous_usage_stats"],
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_is_one_line(mini_server, change, words, stream):
    body = {"model": "mini", "input": ASK, "stream": stream} | change
    reply = mini_server.post("responses", **body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error" and "\n" not in error["message"]
    assert all(word in error["message"] for word in words), error


def test_a_model_that_is_not_here(mini_server):
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        mini_server.openai.responses.create(model="gpt-9", input=ASK)


def failure_of(reply: httpx.Response) -> dict[str, Any]:
    (first, created), (last, failed) = events_of(reply)
    assert (first, last) == ("response.created", "response.failed")
    assert created["response"]["id"] == failed["response"]["id"]
    assert failed["response"]["status"] == "failed"
    return failed["response"]["error"]


def test_a_prompt_that_is_too_long_is_told_as_codex_knows_it(mini_server):
    body = {"model": "mini", "input": "word " * 9000}
    whole = mini_server.post("responses", **body)
    assert whole.status_code == 400
    assert whole.json()["error"]["code"] == "context_length_exceeded"
    error = failure_of(mini_server.post("responses", **body, stream=True))
    assert error["code"] == "context_length_exceeded" and "shorten" in error["message"]


def test_a_full_queue_and_a_failure_in_a_stream():
    with serving(ServedTarget(slots=1, pause=0.2, max_len=6000), max_waiting=0) as server:
        ask: Any = {"model": "fake", "input": "abc", "max_output_tokens": 5000}
        own = {"ignore_eos": True, "seed": 1}  # not every seed's text can be seen
        stream = server.openai.responses.create(**ask, stream=True, extra_body=own)
        seen = [next(stream).type for _ in range(3)]
        assert seen[:2] == ["response.created", "response.in_progress"]
        with pytest.raises(openai.RateLimitError, match="busy"):
            server.openai.responses.create(**ask)
        error = failure_of(server.post("responses", **ask, stream=True))
        assert error["code"] == "rate_limit_exceeded" and "try again in 1s" in error["message"]
        server.target.broken = True
        *_, last = stream
        assert last.type == "response.failed" and last.response.error.code == "server_error"
        assert "device lost" in last.response.error.message


def test_keys_and_bodies_are_as_for_the_chat():
    with scripted("Yes.", api_keys=["geheim"], max_body=2000) as server:
        url, body = f"{server.url}/v1/responses", {"input": ASK}
        assert httpx.post(url, json=body).status_code == 401
        held = {"x-api-key": "geheim"}
        assert httpx.post(url, json=body, headers=held).json()["status"] == "completed"
        assert httpx.post(url, json=body | {"user": "x" * 3000}, headers=held).status_code == 413
        assert httpx.post(url, content="{}", headers=held).status_code == 415


def test_a_client_that_leaves_frees_its_slot():
    with serving(ServedTarget(slots=1, pause=0.02, max_len=6000)) as server:
        ask = {"input": "abc", "max_output_tokens": 5000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/responses", json=ask) as reply:
            next(reply.iter_lines())
        server.wait_until_idle()


def test_openapi_tells_both_apis_and_their_errors(mini_server: Server):
    document = httpx.get(f"{mini_server.url}/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert {"ResponsesRequest", "MessagesRequest", "AnthropicErrorBody"} <= schemas.keys()
    errors = document["paths"]["/v1/messages"]["post"]["responses"]["400"]["content"]
    assert errors["application/json"]["schema"]["$ref"].endswith("AnthropicErrorBody")
