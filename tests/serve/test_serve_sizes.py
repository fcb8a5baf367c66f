"""Size is refused before work is done: bodies before they are parsed, chats before they are
rendered, rendering before it runs on. What is large never holds what is small."""

from __future__ import annotations

import asyncio
import json
import threading

import httpx
import pytest

from serve.body import SPARE_CONTAINERS
from serve.chat_schema import ChatRequest
from serve.errors import ApiError
from serve.grammars import PER_CALLER, GrammarQueue
from serve.lanes import LARGE_WAITING, MEDIUM_BYTES, MEDIUM_THREADS, SMALL_BYTES, Lanes
from serve.prompts import encode, written_bytes
from serve.responses.namespaces import Names
from serve.schema import parse
from targets.chat_template import ChatTemplate, RenderedTooLong
from tests.support.chats import chat_of_body
from tests.support.serving import TOKENIZER, ServedTarget, serving

USER = {"role": "user", "content": "a"}
MAX_LEN = 512
"""Of the shared fake server."""


def refused(server, path: str, body: bytes) -> str:
    headers = {"Content-Type": "application/json"}
    reply = httpx.post(f"{server.url}/{path}", content=body, headers=headers, timeout=60)
    assert reply.status_code == 400, reply.text[:300]
    return reply.json()["error"]["message"]


def wide_tool(count: int) -> dict:
    properties = {f"p{i}": {"type": "string"} for i in range(count)}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize("path", ["v1/chat/completions", "v1/messages", "v1/responses", "tokenize"])
def test_too_many_parts_are_refused_before_they_are_validated(server, monkeypatch, path):
    built = []
    monkeypatch.setattr(
        "serve.schema._one_sentence", lambda validate: built.append(validate) or validate()
    )
    messages = json.dumps([USER] * 5).encode()[1:-1]
    many = b"{}," * (MAX_LEN + SPARE_CONTAINERS + 1)
    name = "input" if path == "v1/responses" else "messages"
    body = b'{"model": "fake", "max_tokens": 1, "%s": [%s%s]}' % (name.encode(), many, messages)
    said = refused(server, path, body)
    assert "objects and arrays" in said and len(built) <= 1


def test_braces_within_texts_are_no_parts(server):
    text = '{["' * (MAX_LEN + SPARE_CONTAINERS)
    said = refused(server, "v1/completions", json.dumps({"prompt": text}).encode())
    assert "the context is" in said


@pytest.mark.parametrize(
    ("path", "name", "limit"),
    [("responses", "input", "max_output_tokens"), ("messages", "messages", "max_tokens")],
)
def test_a_large_body_is_translated_beside_the_event_loop(server, monkeypatch, path, name, limit):
    threads = []

    def refuse(wire):
        threads.append(threading.current_thread().name)
        raise ApiError(400, "seen")

    module = "serve.anthropic.routes" if path == "messages" else "serve.responses.routes"
    monkeypatch.setattr(f"{module}.chat_of", refuse)
    for length in (10, 100_000):
        body = {"model": "fake", limit: 1, name: [{**USER, "content": "a" * length}]}
        refused(server, f"v1/{path}", json.dumps(body).encode())
    assert [name.startswith("specdec-large") for name in threads] == [False, True]


def test_more_functions_than_a_chat_may_have_are_refused_before_their_names_are_made(monkeypatch):
    """Names of other letters alone would all be one: each is counted up from it."""
    monkeypatch.setattr(Names, "_add", None)
    inner = [{"type": "function", "name": chr(0x4E00 + i)} for i in range(4000)]
    tools = [{"type": "namespace", "name": "all", "tools": inner}]
    with pytest.raises(ApiError, match="4000 functions") as refusal:
        chat_of_body("responses", {"input": "Go on", "tools": tools})
    assert refusal.value.param == "tools"


def test_a_tool_that_no_context_holds_is_refused_unrendered(monkeypatch):
    monkeypatch.setattr(TOKENIZER, "chat_pieces", None)  # rendering would fail
    body = {"messages": [USER], "tools": [wide_tool(40_000)]}
    with pytest.raises(ApiError, match="the prompt has at least") as refusal:
        encode(parse(ChatRequest, json.dumps(body).encode()), TOKENIZER, MAX_LEN)
    assert refusal.value.param == "tools"


@pytest.mark.parametrize("where", ["arguments", "kwargs", "description"])
def test_every_part_that_a_template_writes_is_counted(monkeypatch, where):
    monkeypatch.setattr(TOKENIZER, "chat_pieces", None)
    long = "x" * (MAX_LEN * TOKENIZER.longest_token)
    body: dict = {"messages": [USER]}
    if where == "kwargs":
        body["chat_template_kwargs"] = {"note": [{"deep": long}]}
    elif where == "description":
        tool = wide_tool(1)
        tool["function"]["description"] = long
        body["tools"] = [tool]
    else:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": long}}
        call["function"]["arguments"] = json.dumps({"a": long})
        body["messages"] += [{"role": "assistant", "tool_calls": [call]}]
    with pytest.raises(ApiError, match="the prompt has at least"):
        encode(parse(ChatRequest, json.dumps(body).encode()), TOKENIZER, MAX_LEN)


def test_rendering_stops_where_the_text_is_too_long():
    rows = []
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")

    class Row(dict):
        def __getitem__(self, key):
            rows.append(1)
            return "ten chars."

    with pytest.raises(RenderedTooLong):
        template.render([Row(content="") for _ in range(1000)], {}, 100)
    assert len(rows) < 20
    assert len(template.render([{"content": "ten chars."}] * 10, {}, 100)) == 100


def test_counting_ends_early():
    assert written_bytes({"a": ["bcd", {"é": 1}], "n": 7}, 100) == 7
    assert written_bytes(["x"] * 10**6, 10) == 11


@pytest.mark.parametrize("size", [SMALL_BYTES + 1, MEDIUM_BYTES, MEDIUM_BYTES + 1])
def test_small_work_does_not_wait_for_larger(size):
    async def main() -> list[str]:
        lanes, release, done = Lanes(), threading.Event(), []

        async def larger() -> None:
            await lanes.run(size, release.wait, 60)
            done.append("larger")

        async def small() -> None:
            await lanes.run(10, done.append, "small")

        others = [asyncio.create_task(larger()) for _ in range(4)]
        await asyncio.gather(*(small() for _ in range(8)))
        release.set()
        await asyncio.gather(*others)
        return done

    assert asyncio.run(main()) == ["small"] * 8 + ["larger"] * 4


@pytest.mark.parametrize(("cores", "most"), [(1, 1), (2, 1), (4, 2), (64, MEDIUM_THREADS)])
def test_encoding_takes_half_of_the_cores_at_most(cores, most, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    others, release = set(threading.enumerate()), threading.Event()

    async def main() -> int:
        lanes = Lanes()
        works = [asyncio.create_task(lanes.run(MEDIUM_BYTES, release.wait, 60)) for _ in range(9)]
        await lanes.run(10, len, "")  # behind them
        begun = {thread.name for thread in set(threading.enumerate()) - others}
        release.set()
        await asyncio.gather(*works)
        return sum(name.startswith("specdec-medium") for name in begun)

    assert asyncio.run(main()) == most


def test_only_so_many_large_bodies_are_read_at_once():
    lanes = Lanes()
    held = [lanes.admitted(MEDIUM_BYTES + 1) for _ in range(LARGE_WAITING)]
    for one in held:
        one.__enter__()
    with pytest.raises(ApiError) as refusal, lanes.admitted(None):
        pass
    assert refusal.value.status == 429 and "Retry-After" in refusal.value.headers
    with lanes.admitted(MEDIUM_BYTES):
        held[0].__exit__(None, None, None)
    with lanes.admitted(MEDIUM_BYTES + 1):
        pass
    held[0] = lanes.admitted(None)
    held[0].__enter__()
    with pytest.raises(ApiError):
        asyncio.run(lanes.prepare(MEDIUM_BYTES + 1, len, ""))
    assert asyncio.run(lanes.prepare(MEDIUM_BYTES, len, "")) == 0


def test_grammars_wait_in_a_bounded_queue_of_their_own():
    async def main() -> list[int]:
        release, grammars = threading.Event(), GrammarQueue(lambda: PER_CALLER + 2)
        statuses = []

        async def one(caller: str) -> None:
            try:
                await grammars.run(caller, release.wait)
            except ApiError as refusal:
                statuses.append(refusal.status)

        tasks = [asyncio.create_task(one("a")) for _ in range(PER_CALLER + 1)]
        tasks += [asyncio.create_task(one(f"b{i}")) for i in range(3)]
        await asyncio.sleep(0)
        assert grammars.waiting == PER_CALLER + 2
        left = tasks.pop(PER_CALLER - 1)  # its client leaves while it waits
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert grammars.waiting == PER_CALLER + 1
        release.set()
        await asyncio.gather(*tasks)
        assert grammars.waiting == 0
        return statuses

    assert asyncio.run(main()) == [429, 429]


def test_a_plain_request_is_answered_while_a_grammar_is_tried(mini_server, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(
        "specdec.constraints.trial.Trial.complaint", lambda _, grammar: release.wait(60) and "bad"
    )
    replies = []

    def constrained(number: int) -> None:
        choice = [f"never seen {number}"]
        replies.append(
            mini_server.post("completions", prompt="ab", structured_outputs={"choice": choice})
        )

    threads = [threading.Thread(target=constrained, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        reply = mini_server.post("completions", prompt="ab", max_tokens=4)
        assert reply.status_code == 200 and not replies
    release.set()
    for thread in threads:
        thread.join()
    assert {reply.status_code for reply in replies} == {400}


def test_a_prompt_that_is_only_scored_counts_once():
    with serving(ServedTarget(slots=1), max_waiting=2) as server:
        asked = {"prompt": ["ab"] * 3, "echo": True, "max_tokens": 0, "logprobs": 1}
        choices = server.post("completions", **asked).json()["choices"]
        assert [choice["text"] for choice in choices] == ["ab"] * 3
        crowded = server.post("completions", **asked | {"max_tokens": 1})
        assert crowded.status_code == 400 and "needs 6 sequences" in crowded.text


def test_a_late_refusal_has_the_form_that_codex_reads(mini_server, monkeypatch):
    """Its headers were sent, as the request was prepared for longer than a stream waits."""
    monkeypatch.setattr("serve.answer.HEADERS_SECONDS", 0)
    reply = mini_server.post("responses", input="word " * 9000, stream=True)
    assert reply.status_code == 200
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data")]
    assert [event["type"] for event in events] == ["response.created", "response.failed"]
    assert events[-1]["response"]["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("completions", {"prompt": "ab", "max_tokens": 4}),
        ("messages", {"model": "mini", "messages": [USER], "max_tokens": 4}),
        ("responses", {"input": "ab", "max_output_tokens": 4}),
    ],
)
def test_a_stream_says_that_the_server_failed(mini_server, monkeypatch, route, body):
    monkeypatch.setattr("serve.generation.ChoiceText.feed", lambda *_: 1 // 0)
    said = mini_server.post(route, stream=True, **body).text
    assert "the server failed (ZeroDivisionError)" in said
    assert said.endswith("data: [DONE]\n\n") or "response.failed" in said or "event: error" in said


def test_a_stream_waits_with_headers_and_comments(mini_server, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr("serve.answer.HEADERS_SECONDS", 0.05)
    monkeypatch.setattr("serve.answer.PING_SECONDS", 0.05)
    monkeypatch.setattr(
        "specdec.constraints.trial.Trial.complaint", lambda _, grammar: release.wait(60) and "bad"
    )
    body = {"prompt": "ab", "stream": True, "structured_outputs": {"choice": ["a late one"]}}
    with httpx.stream("POST", f"{mini_server.url}/v1/completions", json=body, timeout=60) as reply:
        assert reply.status_code == 200
        lines = reply.iter_lines()
        assert next(lines).startswith(":")
        release.set()
        rest = [line for line in lines if line.startswith("data: ")]
    assert (
        json.loads(rest[0][6:])["error"]["message"].endswith("bad") and rest[-1] == "data: [DONE]"
    )
