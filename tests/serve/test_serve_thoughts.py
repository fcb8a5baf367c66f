"""Thoughts that lack a beginning or an end, and calls as Gemma really writes them, over HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.serving import Server, events_of, scripted

ASK: Any = [{"role": "user", "content": "Go"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": ASK},
    "responses": {"input": ASK},
    "messages": {"model": "m", "max_tokens": 200, "messages": ASK},
}
TOOLS: dict[str, Any] = {
    "chat/completions": [{"type": "function", "function": {"name": "f"}}],
    "responses": [{"type": "function", "name": "f"}],
    "messages": [{"name": "f", "input_schema": {}}],
}


def whole(server: Server, path: str, **more: Any) -> Any:
    reply = server.post(path, **BODIES[path] | more)
    assert reply.status_code == 200, reply.text
    return reply.json()


def told(path: str, answer: Any) -> tuple[str, str, list[tuple[str, Any]]]:
    """Content, thought and calls of a whole answer."""
    if path == "chat/completions":
        message = answer["choices"][0]["message"]
        calls = [c["function"] for c in message.get("tool_calls", [])]
        told = [(c["name"], json.loads(c["arguments"])) for c in calls]
        return message["content"] or "", message.get("reasoning") or "", told
    text, thought, found = "", "", []
    for item in answer["output" if path == "responses" else "content"]:
        match item["type"]:
            case "message":
                text += item["content"][0]["text"]
            case "reasoning":
                thought += item["content"][0]["text"]
            case "function_call":
                found.append((item["name"], json.loads(item["arguments"])))
            case "text":
                text += item["text"]
            case "thinking":
                thought += item["thinking"]
            case "tool_use":
                found.append((item["name"], item["input"]))
    return text, thought, found


@pytest.mark.parametrize("path", BODIES)
def test_a_whole_answers_thought_needs_no_beginning(path):
    with scripted("thought\nThey ask for a sum.\n<channel|>Four.") as server:
        answer = whole(server, path)
    assert told(path, answer) == ("Four.", "They ask for a sum.", [])


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_has_sent_such_a_thought_and_goes_on(path):
    """Sent text can't be taken back: nothing is lost or repeated."""
    with scripted("They ask.<channel|>Four.") as server:
        text = server.post(path, **BODIES[path], stream=True).text
    lines = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    said = json.dumps(lines)
    assert "error" not in [line.get("type") for line in lines] and "<channel|>" not in said
    if path == "chat/completions":
        deltas = [line["choices"][0]["delta"] for line in lines]
        assert "".join(delta.get("content") or "" for delta in deltas) == "They ask.Four."


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("text", ["<|channel>thought\nHm, hm.", "<|channel>thought\n"])
def test_an_empty_answer_says_that_its_thought_never_ended(path, text, caplog):
    with scripted(text) as server:
        answer = whole(server, path)
        stream = server.post(path, **BODIES[path], stream=True)
    notice = answer["choices"][0]["notice"] if "choices" in answer else answer["notice"]
    assert "thought never ended" in notice and notice in stream.text
    assert "thought never ended" in caplog.text and "Hm" not in caplog.text
    if path != "chat/completions":
        events_of(stream)


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_with_text_or_calls_has_no_notice(path):
    for text in ("<|channel>thought\nHm.\n<channel|>Yes.", "<|tool_call>call:f{}<tool_call|>"):
        with scripted(text) as server:
            assert "notice" not in json.dumps(whole(server, path, tools=TOOLS[path]))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('f{"a": "x, {y}", "b": [True, None]}', {"a": "x, {y}", "b": [True, None]}),
        ("f(a='x', b=2)", {"a": "x", "b": 2}),
        ('server:f{a:<|"|>x<|"|>}', {"a": "x"}),
    ],
)
def test_calls_in_other_forms_are_calls(path, call, arguments):
    with scripted(f"<|tool_call>call:{call}<tool_call|><|tool_response>") as server:
        answer = whole(server, path, tools=TOOLS[path])
    assert told(path, answer) == ("", "", [("f", arguments)])
