"""`LLM.chat` and `LLM.stream` with tools and thoughts: the same prompt and the same parts as the
server's, for the same request; and mistakes, each one line."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

import specdec
from specdec.core.errors import UserError
from tests.support.serving import Server, serving_mini

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {
                name: {"type": "integer", "minimum": 0, "maximum": 99} for name in ("a", "b")
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
RUN: dict[str, Any] = {"type": "function", "function": {"name": "run"}}
MESSAGES = [{"role": "user", "content": "Add 1 and 2"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1,"b":2}'}}
HISTORY = [
    {"role": "developer", "content": "Be short."},
    *MESSAGES,
    {"role": "assistant", "content": None, "reasoning_content": "I add.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
]


@pytest.fixture(scope="module")
def llm():
    with specdec.load("mini", drafter="ngram", k=4, max_len=512) as llm:
        yield llm


@pytest.fixture(scope="module")
def server():
    with serving_mini(max_len=512) as server:
        yield server


@pytest.fixture(scope="module")
def begun(llm) -> dict[int, float]:
    """A bias with which an answer begins with a thought, if it may."""
    return {llm.tokenizer.token_id("<|channel>"): 100}


def served(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """What the server parses: the choice's message, and why it ended."""
    reply = server.post("chat/completions", model="mini", temperature=0, **body)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    said = choice["message"]
    return {
        "text": said["content"] or "",
        "reasoning": said.get("reasoning_content", ""),
        "calls": [call["function"] for call in said.get("tool_calls", ())],
        "finish": choice["finish_reason"],
        "prompt": reply.json()["usage"]["prompt_tokens"],
    }


def parsed(answer: specdec.Answer) -> dict[str, Any]:
    calls = [{"name": c.name, "arguments": c.arguments_text} for c in answer.tool_calls]
    return {
        "text": answer.text,
        "reasoning": answer.reasoning,
        "calls": calls,
        "finish": answer.finish_reason,
        "prompt": len(answer.prompt_ids),
    }


def wire(options: dict[str, Any]) -> dict[str, Any]:
    """The server's names of the door's options."""
    wishes = {name: value for name, value in options.items() if name != "thinking"}
    if "thinking" in options:
        wishes["chat_template_kwargs"] = {"enable_thinking": options["thinking"]}
    return wishes


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        (MESSAGES, {}),
        (HISTORY, {"tools": [ADD]}),
        (MESSAGES, {"tools": [ADD, RUN], "tool_choice": "required"}),
        (MESSAGES, {"tools": [ADD, RUN], "tool_choice": "none"}),
        (MESSAGES, {"tools": [ADD, RUN], "tool_choice": RUN}),
        (MESSAGES, {"thinking": False}),
    ],
    ids=["text", "history", "required", "none", "named", "no thought"],
)
def test_a_chat_is_the_servers(llm, server, messages, options):
    answer = llm.chat(messages, temperature=0, max_tokens=40, **options)
    body = {"messages": messages, "max_tokens": 40, **wire(options)}
    assert parsed(answer) == served(server, body)


def streamed(server: Server, body: dict[str, Any]) -> list[tuple[str, Any]]:
    """What the server's stream has, delta by delta: texts, thoughts, calls without their ids, and
    the end."""
    body = body | {"model": "mini", "temperature": 0, "stream": True}
    reply = server.post("chat/completions", **body)
    blocks = [block.removeprefix("data: ") for block in reply.text.split("\n\n") if block]
    found: list[tuple[str, Any]] = []
    for block in blocks[:-1]:
        (choice,) = json.loads(block)["choices"]
        said = choice["delta"]
        found += [("thought", said.get("reasoning")), ("text", said.get("content"))]
        for call in said.get("tool_calls", ()):
            function = call["function"]
            found.append((f"call {call['index']}", (function.get("name"), function["arguments"])))
        found.append(("end", choice["finish_reason"]))
    return [(name, part) for name, part in found if part]


def pieces(chunk: specdec.Chunk) -> list[tuple[str, Any]]:
    """The same of a chunk of the door's."""
    calls = [(f"call {c.index}", (c.name, c.arguments_text)) for c in chunk.tool_calls]
    found = [("thought", chunk.reasoning), ("text", chunk.text), *calls]
    return [(name, part) for name, part in [*found, ("end", chunk.finish_reason)] if part]


@pytest.mark.parametrize(
    "options",
    [
        {"tools": []},
        {"tools": [ADD, RUN], "tool_choice": "required"},
        {"tools": [ADD, RUN], "tool_choice": "none"},
        {"tools": [ADD, RUN], "tool_choice": RUN},
        {"thinking": False},
    ],
    ids=["text", "required", "none", "named", "no thought"],
)
def test_a_stream_is_the_servers(llm, server, options):
    chunks = list(llm.stream(MESSAGES, temperature=0, max_tokens=40, **options))
    body = {"messages": MESSAGES, "max_tokens": 40, **wire(options)}
    assert [part for chunk in chunks for part in pieces(chunk)] == streamed(server, body)
    ids = [call.id for chunk in chunks for call in chunk.tool_calls if call.name]
    assert bool(ids) == (options.get("tool_choice") in ("required", RUN))
    assert all(ids) and len(set(ids)) == len(ids)
    whole = llm.chat(MESSAGES, temperature=0, max_tokens=40, **options)
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids


def test_a_streams_thought_is_apart_from_the_text(llm, server, begun):
    options = {"thinking_token_budget": 6, "max_tokens": 30}
    chunks = list(
        llm.stream(
            MESSAGES, thinking=True, regex="[0-9]", temperature=0, logit_bias=begun, **options
        )
    )
    body = options | wire({"thinking": True}) | {"messages": MESSAGES}
    body["logit_bias"] = {str(token): bias for token, bias in begun.items()}
    body["structured_outputs"] = {"regex": "[0-9]"}
    found = [part for chunk in chunks for part in pieces(chunk)]
    assert found == streamed(server, body)
    assert {name for name, _ in found} == {"thought", "text", "end"}


def test_a_stream_awaited_has_tools(llm):
    options = {"tools": [ADD], "tool_choice": "required", "temperature": 0}

    async def use() -> list[Any]:
        return [
            part
            async for chunk in specdec.AsyncLLM(llm).stream(MESSAGES, **options)
            for part in pieces(chunk)
        ]

    here = [part for chunk in llm.stream(MESSAGES, **options) for part in pieces(chunk)]
    assert asyncio.run(use()) == here and here[0][0] == "call 0"


@pytest.mark.parametrize("prompt", ["Hi", [3, 4]])
@pytest.mark.parametrize("options", [{"tools": [ADD]}, {"thinking": True}])
def test_tools_and_thoughts_need_messages(llm, prompt, options):
    with pytest.raises(UserError, match="give messages"):
        next(iter(llm.stream(prompt, **options)))


@pytest.mark.parametrize("most", [30, 6], ids=["whole", "cut"])
def test_a_thought_is_apart_from_the_text(llm, server, begun, most):
    options = {"thinking_token_budget": 6, "tools": [ADD], "logit_bias": begun}
    answer = llm.chat(
        MESSAGES, thinking=True, regex="[0-9]", temperature=0, max_tokens=most, **options
    )
    assert answer.reasoning and answer.text.isdigit() == (most == 30)
    body = options | {"logit_bias": {str(token): bias for token, bias in begun.items()}}
    body |= {"chat_template_kwargs": {"enable_thinking": True}, "max_tokens": most}
    body |= {"structured_outputs": {"regex": "[0-9]"}, "messages": MESSAGES}
    assert parsed(answer) == served(server, body)


def test_a_call_is_answered_and_the_chat_goes_on(llm):
    answer = llm.chat(MESSAGES, tools=[ADD], tool_choice="required", temperature=0)
    (call,) = answer.tool_calls
    assert call.name == "add" and call.arguments.keys() == {"a", "b"}
    assert (answer.text, answer.finish_reason) == ("", "tool_calls")
    result = {"role": "tool", "tool_call_id": call.id, "content": "a result"}
    after = llm.chat([*MESSAGES, answer.message, result], tools=[ADD], max_tokens=2)
    shown = llm.tokenizer.decode(after.prompt_ids, skip_special=False)
    assert "call:add{" in shown and "a result" in shown
    again = llm.chat(MESSAGES, tools=[ADD], tool_choice="required", temperature=0)
    assert again.tool_calls[0].id != call.id


def test_arguments_of_a_cut_call_are_refused(llm):
    cut = llm.chat(MESSAGES, tools=[ADD], tool_choice="required", max_tokens=6, temperature=0)
    (call,) = cut.tool_calls
    assert cut.finish_reason == "length"
    with pytest.raises(UserError, match="cut within the call of add: allow more max_tokens"):
        _ = call.arguments


def test_a_receipt_has_how_the_answer_was_taken_apart(llm):
    answer = llm.chat(MESSAGES, tools=[ADD], tool_choice="required", temperature=0)
    output = answer.receipt().limits.output
    assert (output.form, output.tools) == ("chat", ("add",))


def test_the_same_awaited(llm):
    async def use() -> specdec.Answer:
        awaited = specdec.AsyncLLM(llm)
        return await awaited.chat(MESSAGES, tools=[ADD], tool_choice="required", temperature=0)

    here = llm.chat(MESSAGES, tools=[ADD], tool_choice="required", temperature=0)
    assert parsed(asyncio.run(use())) == parsed(here)


TEXTS: list[list[Any]] = [
    [{"text": "Add 1"}, {"text": "and 2"}],
    [{"type": "text", "text": "Add 1"}, {"type": "text", "text": "and 2"}],
    [{"type": "text", "text": "Add 1"}, {"type": "input_text", "text": "and 2"}],
    ["Add 1", "and 2"],
]


@pytest.mark.parametrize("parts", TEXTS)
def test_parts_with_texts_are_read_as_on_the_server(llm, server, parts):
    whole = {"messages": [{"role": "user", "content": "Add 1\nand 2"}]}
    messages = [{"role": "user", "content": parts}]
    said = llm.chat(messages, temperature=0, max_tokens=4)
    assert parsed(said) == served(server, {**whole, "max_tokens": 4})
    assert llm.generate(messages, temperature=0, max_tokens=4).prompt_ids == said.prompt_ids
    if "type" in str(parts):
        assert parsed(said) == served(server, {"messages": messages, "max_tokens": 4})


def test_what_stands_beside_parts_is_kept(llm):
    """A refusal, and calls that are lines of text."""
    other = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    said = {"role": "assistant", "content": [{"text": "So."}], "refusal": "I can't."}
    messages = [*MESSAGES, said | {"tool_calls": [other]}, *MESSAGES]
    prompt = llm.tokenizer.decode(llm.chat(messages, max_tokens=1).prompt_ids)
    assert "So." in prompt and "I can't." in prompt and "*** Begin" in prompt


PIXEL = "data:image/png;base64,iVBORw0KGgo="
STRANGE: list[Any] = [
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    {"type": "file", "file": {"file_data": PIXEL}},
    {"type": "made_up", "text": "tomorrow"},
    {"type": "text"},
    {"type": "text", "text": 5},
    {"type": 5, "text": "Hi"},
    {"txt": "Hi"},
    {},
    5,
    None,
]
SHOWN: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": PIXEL}},
    {"type": "image_url", "image_url": PIXEL},
    {"type": "input_image", "image_url": PIXEL},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
    {"image": b"x"},
]


@pytest.mark.parametrize("role", ["user", "tool", "assistant", "system"])
@pytest.mark.parametrize("part", [*STRANGE, *SHOWN], ids=str)
def test_what_is_neither_text_nor_picture_is_refused(llm, part, role):
    """And pictures, by a model that takes none."""
    content = [{"type": "text", "text": "what is it?"}, part]
    messages = [*HISTORY[:3], {"role": role, "tool_call_id": "c1", "content": content}]
    words = "takes no pictures" if part in SHOWN else r"content\[1\]: a part is a text"
    with pytest.raises(UserError, match=words) as refused:
        llm.chat(messages, max_tokens=1)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300
    with pytest.raises(UserError, match=words):
        llm.generate(messages, max_tokens=1)


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        ("Hi", {}, "messages is a list of"),
        ([], {}, "messages: list should have at least 1 item"),
        (["Hi"], {}, r"messages\[0\]: "),
        ([{"role": "person", "content": "Hi"}], {}, r"messages\[0\].role: "),
        (MESSAGES, {"tools": ADD}, "tools: input should be a valid list"),
        (MESSAGES, {"tools": [{"type": "function"}]}, r"tools\[0\].function: field required"),
        (MESSAGES, {"tools": [ADD, ADD]}, "tools holds two functions of one name"),
        (MESSAGES, {"tool_choice": "required"}, "tool_choice needs tools"),
        (MESSAGES, {"tools": [ADD], "tool_choice": "maybe"}, "tool_choice: must be none, auto"),
        (MESSAGES, {"tools": [ADD], "tool_choice": RUN}, "'run', which is not among the tools"),
        (MESSAGES, {"thinking": "yes"}, "thinking is True, False or None, not 'yes'"),
        (MESSAGES, {"thinking_token_budget": -1}, "thinking_token_budget: "),
        (MESSAGES, {"regex": "a", "choice": ["b"]}, "give one of regex, choice"),
        (MESSAGES, {"regex": "("}, "the grammar can't be used"),
        (MESSAGES, {"allowed_token_ids": [4096]}, "ids from 0 to 4095"),
        (MESSAGES, {"bad_words": [" "]}, "empty word"),
        (MESSAGES, {"tol": []}, "unknown sampling parameter tol"),
    ],
)
def test_mistakes_are_one_line(llm, messages, options, words):
    with pytest.raises(UserError, match=words) as refused:
        llm.chat(messages, **options)
    assert "\n" not in str(refused.value)
