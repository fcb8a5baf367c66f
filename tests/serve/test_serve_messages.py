"""Anthropic's Messages API over HTTP, as its SDK and Claude Code use it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import httpx
import pydantic
import pytest

from serve.anthropic.emitter import AnthropicEmitter
from serve.anthropic.schema import MessagesRequest
from serve.anthropic.translate import chat_of
from serve.schema import parse
from serve.stream import TOO_AMBIGUOUS, Piece
from tests.support.chats import prompt_of
from tests.support.constrained import mini_tokenizer
from tests.support.fakes import ScriptedTarget
from tests.support.fakes_snapshots import cached_engine
from tests.support.serving import SAID, ServedTarget, Server, events_of, scripted, served, serving
from tests.support.templates import WITH_TOOLS

if TYPE_CHECKING:  # 3,100 modules: the worker that runs these tests imports them
    import anthropic

ASK: Any = [{"role": "user", "content": "What is 2 + 3?"}]
ADD = {
    "type": "object",
    "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99} for name in "ab"},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL: Any = {"name": "add", "description": "Sums", "input_schema": ADD}
FREE: Any = [{"name": name, "input_schema": {"type": "object"}} for name in ("edit", "run")]
BODY = {"model": "claude-any", "max_tokens": 99, "messages": ASK}
SECRET = "geheim"


def client_of(server: Server, **options: Any) -> anthropic.Anthropic:
    import anthropic

    given = {"base_url": server.url, "api_key": "none", "max_retries": 0} | options
    return anthropic.Anthropic(**given)


@pytest.fixture
def client(mini_server: Server) -> Iterator[anthropic.Anthropic]:
    with client_of(mini_server) as made:
        yield made


def test_it_says_what_the_chat_says(mini_server, client):
    """The same model, chat and seed by either API, whole and streamed, several at once."""
    wish = {"temperature": 1.0, "top_p": 0.9}
    chat = [{"role": "system", "content": "Be brief."}, *ASK]

    def of_chat(seed: int) -> dict[str, str]:
        body = {"messages": chat, "seed": seed, "max_tokens": 12, **wish}
        return mini_server.post("chat/completions", **body).json()["choices"][0]["message"]

    def of_messages(seed: int) -> tuple[str, str]:
        ask: Any = {"model": "any-name", "max_tokens": 12, "system": "Be brief.", "messages": ASK}
        ask["extra_body"] = wish | {"seed": seed}
        whole = client.messages.create(**ask)
        with client.messages.stream(**ask) as stream:
            text = "".join(stream.text_stream)
            last = stream.get_final_message()
        assert (whole.model, whole.role, whole.type) == ("any-name", "assistant", "message")
        assert last.usage == whole.usage
        assert (last.stop_reason, whole.stop_reason) == ("max_tokens", "max_tokens")
        assert last.usage.output_tokens == 12
        return text, "".join(block.text for block in whole.content if block.type == "text")

    expected = [of_chat(seed)["content"] for seed in range(3)]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(of_messages, range(3))) == [(text, text) for text in expected]


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "add", "disable_parallel_tool_use": True}]
)
def test_demanded_calls_are_valid(client, choice):
    message = client.messages.create(
        model="mini",
        max_tokens=300,
        messages=ASK,
        tools=[TOOL],
        tool_choice=choice,
        extra_body={"temperature": 1.0, "seed": 1},
    )
    assert message.stop_reason == "tool_use"
    calls = [block for block in message.content if block.type == "tool_use"]
    assert calls == message.content and len({call.id for call in calls}) == len(calls) > 0
    assert all(0 <= call.input[name] <= 99 for call in calls for name in "ab")
    assert len(calls) == 1 or choice["type"] == "any"


class Sum(pydantic.BaseModel):
    kind: Literal["sum", "product"]
    left: Literal[1, 2, 3]


def test_parse_gives_a_pydantic_object(client):
    message = client.messages.parse(
        model="mini", max_tokens=200, messages=ASK, output_format=Sum, extra_body={"seed": 3}
    )
    assert isinstance(message.parsed_output, Sum)


@pytest.mark.parametrize("template", WITH_TOOLS)
def test_the_tool_runner_runs_to_the_end(template):
    """Thought and call go back into the history unchanged. The SDK's runner first tries to use a
    thread, and gets the error that there are none."""
    import anthropic

    call = "<|channel>thought\nSum it.\n<channel|>Well.<|tool_call>call:add{a:2,b:3}<tool_call|>"
    asked: list[tuple[int, int]] = []

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Sums.

        Args:
            a: one
            b: another
        """
        asked.append((a, b))
        return str(a + b)

    with (
        scripted(f"{call}<|tool_response>", then="It is 5.", template=template) as server,
        client_of(server) as client,
    ):
        runner = client.beta.messages.tool_runner(
            model="claude-any",
            max_tokens=200,
            messages=ASK,
            tools=[add],
            thinking={"type": "enabled", "budget_tokens": 1024},
        )
        *_, last = runner
    assert asked == [(2, 3)] and last.stop_reason == "end_turn"
    assert [block.text for block in last.content] == ["It is 5."]


def test_events_of_a_stream_are_all_there_in_order():
    """Each is needed: without any one of them this list is another."""
    body = BODY | {"tools": FREE, "stream": True, "thinking": {"type": "adaptive"}}
    with scripted(SAID) as server:
        events = events_of(server.post("messages?beta=true", **body))
        whole = server.post("messages", **body | {"stream": False}).json()
        with (
            client_of(server) as client,
            client.messages.stream(
                model="x", max_tokens=99, messages=ASK, tools=FREE, thinking={"type": "adaptive"}
            ) as stream,
        ):
            accumulated = stream.get_final_message()
    names = [name for name, _ in events]
    short = [name for i, name in enumerate(names) if names[i - 1 : i] != [name]]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert short == ["message_start", "ping", *block * 4, "message_delta", "message_stop"]
    told = [held for name, held in events if name == "content_block_delta"]
    kinds = [(held["index"], held["delta"]["type"]) for held in told]
    assert [k for i, k in enumerate(kinds) if kinds[i - 1 : i] != [k]] == [
        (0, "thinking_delta"),
        (0, "signature_delta"),
        (1, "text_delta"),
        (2, "input_json_delta"),
        (3, "input_json_delta"),
    ]
    starts = [held for name, held in events if name == "content_block_start"]
    stops = [held["index"] for name, held in events if name == "content_block_stop"]
    assert [held["index"] for held in starts] == stops == [0, 1, 2, 3]
    empty = [{**held["content_block"], "id": None} for held in starts]
    assert empty == [
        {"type": "thinking", "thinking": "", "signature": "", "id": None},
        {"type": "text", "text": "", "id": None},
        {"type": "tool_use", "name": "edit", "input": {}, "id": None},
        {"type": "tool_use", "name": "run", "input": {}, "id": None},
    ]
    start = events[0][1]["message"]
    assert start["content"] == [] and start["stop_reason"] is None
    assert start["usage"]["input_tokens"] == whole["usage"]["input_tokens"] > 0
    (end,) = [held for name, held in events if name == "message_delta"]
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["usage"] == whole["usage"]
    thought, text, edit, run = whole["content"]
    assert (thought["thinking"], text["text"]) == ("I must call {it}.", "Let me see.\n")
    assert thought["signature"] and edit["input"] == EDIT and run["input"] == {}
    plain = [{**block.model_dump(exclude_none=True), "id": None} for block in accumulated.content]
    assert plain == [{**block, "id": None} for block in whole["content"]]


EDIT = {"path": "a.py", "new": 'x = {"a": [1]}\n', "line": 4}


@pytest.mark.parametrize(
    ("wish", "reason", "stop"),
    [
        ({}, "end_turn", None),
        ({"stop_sequences": ["three", "two"]}, "stop_sequence", "two"),
        ({"max_tokens": 2}, "max_tokens", None),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_why_it_stopped(wish, reason, stop, stream):
    with scripted("one two three") as server:
        reply = server.post("messages", **BODY | wish | {"stream": stream})
    said = dict(events_of(reply))["message_delta"]["delta"] if stream else reply.json()
    assert (said["stop_reason"], said["stop_sequence"]) == (reason, stop)


def test_the_context_ends_before_max_tokens():
    with scripted("word " * 200, max_len=64) as server:
        said = server.post("messages", **BODY).json()
    assert said["stop_reason"] == "model_context_window_exceeded"


def test_a_grammars_limit_is_not_the_contexts():
    generation: Any = SimpleNamespace(plan=SimpleNamespace(choices=[SimpleNamespace(max_tokens=5)]))
    emitter = AnthropicEmitter("m", "mini", 9, generation)
    for notice, reason in ((None, "model_context_window_exceeded"), (TOO_AMBIGUOUS, "max_tokens")):
        piece = Piece((), (), "length", notice=notice)
        assert emitter._stop(piece)["stop_reason"] == reason


def test_a_call_that_is_cut_has_no_input_and_says_so():
    with scripted(SAID) as server:
        said = server.post("messages", **BODY | {"tools": FREE, "max_tokens": 40}).json()
    assert said["stop_reason"] == "max_tokens"
    assert said["content"][-1]["name"] == "edit" and said["content"][-1]["input"] == {}


def test_a_call_that_was_cut_is_shown_to_the_model_as_it_was_written():
    with scripted(SAID) as server:
        said = server.post("messages", **BODY | {"tools": FREE, "max_tokens": 40}).json()
    (cut,) = [block for block in said["content"] if block["type"] == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": cut["id"], "content": "no input"}
    again = [*ASK, {"role": "assistant", "content": [cut]}, {"role": "user", "content": [result]}]
    ids = prompt_of("messages", BODY | {"messages": again}, mini_tokenizer())
    text = mini_tokenizer().decode(ids, skip_special=False)
    assert 'call:edit{"path":' in text and "Result of edit: no input" in text


HISTORY: Any = [
    {"role": "user", "content": [{"type": "text", "text": "Go", "cache_control": {"type": "x"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "abc"},
            {"type": "redacted_thinking", "data": "xyz"},
            {"type": "text", "text": "Both."},
            {"type": "tool_use", "id": "t1", "name": "run", "input": {"a": 1}},
            {"type": "tool_use", "id": "t2", "name": "edit", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "fine"},
            {
                "type": "tool_result",
                "tool_use_id": "t2",
                "content": [{"type": "text", "text": "no file"}],
                "is_error": True,
            },
            {"type": "text", "text": "And now?"},
        ],
    },
    {"role": "system", "content": "Be quick."},
]


def test_a_history_means_the_chat_it_was():
    wire = parse(MessagesRequest, json.dumps(BODY | {"messages": HISTORY, "tools": FREE}).encode())
    user, said, fine, failed, again, system = (m.for_template() for m in chat_of(wire).messages)
    assert user == {"role": "user", "content": "Go"}
    assert (said["content"], said["reasoning"]) == ("Both.", "Hm.")
    assert [call["function"]["name"] for call in said["tool_calls"]] == ["run", "edit"]
    assert said["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert fine == {"role": "tool", "content": "fine", "tool_call_id": "t1"}
    assert failed == {"role": "tool", "content": "Error: no file", "tool_call_id": "t2"}
    assert again == {"role": "user", "content": "And now?"}
    assert system == {"role": "system", "content": "Be quick."}


def test_a_last_message_of_the_assistant_is_gone_on_with(mini_server):
    said = {"role": "assistant", "content": "It is"}
    asked = {"messages": [*ASK, said], "max_tokens": 6, "temperature": 0}
    chat = mini_server.post(
        "chat/completions", **asked, continue_final_message=True, add_generation_prompt=False
    )
    whole = mini_server.post("messages", **asked, model="x").json()
    assert whole["content"][0]["text"] == chat.json()["choices"][0]["message"]["content"]


def billed(number: int, as_text: bool = False) -> Any:
    line = f"x-anthropic-billing-header: cc_version=2.1.197; cch={number:05x};"
    prompt = "You are an agent. " * 9
    if as_text:
        return f"{line}\n{prompt}"
    return [{"type": "text", "text": line}, {"type": "text", "text": prompt}]


def test_a_changing_attribution_line_defeats_no_reuse():
    tokenizer = mini_tokenizer()
    script = tokenizer.encode("Yes.")[1:]
    target = ScriptedTarget(script, end=16, slots=2, vocab=tokenizer.vocab_size)
    engine = cached_engine(target=target)
    with served(engine, "mini", tokenizer=tokenizer, k=0) as server:
        asked = [
            server.post("messages", **BODY | {"system": billed(number, number == 2)})
            for number in range(3)
        ]
        counted = server.post(
            "messages/count_tokens", model="x", messages=ASK, system=billed(7)
        ).json()
    first, second, third = (reply.json()["usage"] for reply in asked)
    total = first["input_tokens"]
    assert first["cache_read_input_tokens"] == 0 and counted == {"input_tokens": total}
    for later in (second, third):
        assert later["cache_read_input_tokens"] >= total - 2 * 8
        assert later["cache_read_input_tokens"] + later["input_tokens"] == total


def test_tokens_are_counted_as_they_are_used(mini_server, client):
    ask: Any = {"model": "x", "messages": ASK, "tools": [TOOL], "thinking": {"type": "adaptive"}}
    counted = client.messages.count_tokens(**ask).input_tokens
    used = client.messages.create(**ask, max_tokens=1).usage
    assert counted == used.input_tokens
    assert client.messages.count_tokens(model="x", messages=ASK).input_tokens < counted


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": None}, ["max_tokens"]),
        ({"messages": []}, ["messages"]),
        ({"messages": [{"role": "tool", "content": "x"}]}, ["role", "'user'"]),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, ["image", "text"]),
        ({"messages": [HISTORY[0], {"role": "user", "content": HISTORY[1]["content"]}]}, ["user"]),
        ({"messages": HISTORY[:2]}, ["begins the answer"]),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, ["web_search", "custom"]),
        ({"tools": [TOOL, TOOL]}, ["two functions"]),
        ({"tool_choice": {"type": "any"}}, ["tool_choice", "tools"]),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, ["name"]),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, ["'x'"]),
        ({"thinking": {"type": "loud"}}, ["thinking"]),
        ({"container": "c1"}, ["container"]),
        ({"stop": ["x"]}, ["stop", "stop_sequences"]),
        ({"n": 2}, ["n is not", "one answer"]),
        ({"logprobs": True}, ["logprobs", "/v1/chat/completions"]),
        ({"response_format": {"type": "json_object"}}, ["response_format", "output_config"]),
        ({"thread": {"type": "create"}}, ["thread", "whole conversation"]),
        ({"mcp_servers": [{"name": "m"}]}, ["mcp_servers"]),
        ({"output_format": {"type": "json_schema", "schema": {"not": {}}}}, ["not"]),
        ({"top_p": 7}, ["top_p"]),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, ["prompt is too long"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_is_one_line_in_anthropics_form(mini_server, change, words, stream):
    reply = mini_server.post("messages", **BODY | {"stream": stream} | change)
    assert reply.status_code == 400, reply.text
    told = reply.json()
    assert told["type"] == "error" and told["error"]["type"] == "invalid_request_error"
    assert all(word in told["error"]["message"] for word in words), told
    assert "\n" not in told["error"]["message"]


def test_other_errors_are_in_anthropics_form_too(mini_server):
    url = f"{mini_server.url}/v1/messages"
    old = httpx.post(url, json=BODY, headers={"anthropic-version": "2023-01-01"})
    kinds = {
        "invalid_request_error": [old, httpx.post(url, content="{"), httpx.get(url)],
        "not_found_error": [httpx.post(f"{url}/batches", json={})],
    }
    for kind, replies in kinds.items():
        assert [reply.json()["error"]["type"] for reply in replies] == [kind] * len(replies)
        assert all(reply.json()["type"] == "error" for reply in replies)
    assert "2023-06-01" in old.json()["error"]["message"]
    other = mini_server.post("chat/completions", messages=[]).json()
    assert other.keys() == {"error"} and "param" in other["error"]


def test_answers_and_errors_have_anthropics_request_id(mini_server, client):
    """Its SDK shows it with an error, and with an answer as `_request_id`."""
    import anthropic

    answer = client.messages.create(model="x", max_tokens=1, messages=ASK)
    assert answer._request_id
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(model="x", max_tokens=0, messages=ASK)
    assert refused.value.request_id
    given = {"x-request-id": "mine-1"}
    url = f"{mini_server.url}/v1/messages/count_tokens"
    counted = httpx.post(url, json={"model": "x", "messages": ASK}, headers=given)
    assert counted.headers["request-id"] == counted.headers["x-request-id"] == "mine-1"
    assert "request-id" not in mini_server.post("completions", prompt="x").headers


def test_unknown_names_are_left_out_and_logged(mini_server, caplog):
    caplog.set_level("INFO", "specdec.serve")
    ask = BODY | {"max_tokens": 1, "metadata": {"user_id": "u"}, "brand_new": 1, "betas": []}
    reply = mini_server.post("messages", **ask)
    assert reply.status_code == 200 and "ignored the unknown field 'brand_new'" in caplog.text
    assert "metadata" not in caplog.text


def test_either_header_holds_the_key():
    import anthropic

    with scripted("Yes.", api_keys=[SECRET]) as server:
        with client_of(server, api_key=SECRET) as good:
            assert good.messages.create(**BODY).content[0].text == "Yes."  # pyright: ignore
        with client_of(server, api_key=None, auth_token=SECRET) as good:
            assert good.messages.create(**BODY).stop_reason == "end_turn"  # pyright: ignore
        with (
            client_of(server, api_key="wrong") as bad,
            pytest.raises(anthropic.AuthenticationError, match="x-api-key"),
        ):
            bad.messages.create(**BODY)  # pyright: ignore
        counted = httpx.post(f"{server.url}/v1/messages/count_tokens", json=BODY)
    assert counted.status_code == 401


def test_a_full_queue_and_a_failure_in_a_stream():
    import anthropic

    with serving(ServedTarget(slots=1, pause=0.2, max_len=6000), max_waiting=0) as server:
        ask: Any = {"model": "x", "max_tokens": 5000, "messages": ASK}
        ask["messages"] = [{"role": "user", "content": "abc"}]
        with client_of(server) as client:
            stream = client.messages.create(**ask, stream=True, extra_body={"ignore_eos": True})
            next(iter(stream))
            with pytest.raises(anthropic.RateLimitError, match="busy"):
                client.messages.create(**ask)
            server.target.broken = True
            with pytest.raises(anthropic.APIStatusError, match="device lost"):
                list(stream)


def test_a_client_that_leaves_frees_its_slot():
    with serving(ServedTarget(slots=1, pause=0.02, max_len=6000)) as server:
        ask = {"model": "x", "max_tokens": 5000, "ignore_eos": True, "stream": True}
        ask["messages"] = [{"role": "user", "content": "abc"}]
        with httpx.stream("POST", f"{server.url}/v1/messages", json=ask) as reply:
            next(reply.iter_lines())
        server.wait_until_idle()
        assert server.metrics()  # and the rest goes on
