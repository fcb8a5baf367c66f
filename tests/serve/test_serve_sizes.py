"""Size is refused before work is done: bodies before they are parsed, chats before they are
rendered, rendering before it runs on. What is large never holds what is small."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import httpx
import pytest

from serve.body import SPARE_CONTAINERS
from serve.chat_schema import ChatRequest
from serve.errors import ApiError
from serve.grammars import PER_CALLER, GrammarQueue
from serve.lanes import (
    LARGE_OF_A_KEY,
    LARGE_WAITING,
    MEDIUM_BYTES,
    MEDIUM_THREADS,
    MEDIUM_WAITING,
    SMALL_BYTES,
    SMALL_WAITING,
    Lanes,
)
from serve.messages import MOST_CALLS
from serve.prompts import encode, written_bytes
from serve.responses.namespaces import Names
from serve.schema import parse
from specdec.core.errors import UserError
from targets.chat_template import MOST_STEPS, ChatTemplate, RenderedTooLong
from tests.support.chats import chat_of_body
from tests.support.constrained import mini_tokenizer
from tests.support.serving import TOKENIZER, ServedTarget, serving
from tests.support.templates import template_text, tokenizer_with, with_template

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


def called(turns: int, calls: int = 1, result: str = "done") -> list[dict[str, Any]]:
    """A session: in each turn so many calls and their results."""
    found: list[dict[str, Any]] = [USER]
    for turn in range(turns):
        ids = [f"{turn}-{number}" for number in range(calls)]
        function = {"name": "f", "arguments": '{"path": "a.py"}'}
        made = [{"id": own, "type": "function", "function": function} for own in ids]
        found.append({"role": "assistant", "content": "", "tool_calls": made})
        found += [{"role": "tool", "tool_call_id": own, "content": result} for own in ids]
    return found


def chat(messages: list[dict[str, Any]]) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"messages": messages}).encode())


def test_a_session_of_a_thousand_calls_is_rendered():
    """With a template that looks at all messages for each, in a context that they nearly fill."""
    tokenizer = with_template(template_text("looks_at_all"))
    began = time.process_time()
    (prompt,) = encode(chat(called(1000, result="word " * 40)), tokenizer, 131_072)
    assert 100_000 < len(prompt.ids) and time.process_time() - began < 20


def test_rendering_has_a_budget(monkeypatch):
    """Such loops yield no text: they would go on for hours."""
    monkeypatch.setattr("targets.chat_template.MOST_STEPS", MOST_STEPS // 16)
    tokenizer = with_template(template_text("looks_at_all"))
    with pytest.raises(ApiError, match="the chat template takes too many steps") as refusal:
        encode(chat(called(1000)), tokenizer, 131_072)
    assert refusal.value.status == 400 and refusal.value.code == "context_length_exceeded"
    assert refusal.value.param == "messages"
    with pytest.raises(UserError, match="send fewer messages and tool calls"):
        tokenizer.chat_pieces([USER] * 1500)


def test_the_budget_is_of_one_rendering(monkeypatch):
    monkeypatch.setattr("targets.chat_template.MOST_STEPS", 1024)
    for _ in range(99):
        mini_tokenizer().render([USER] * 9)


@pytest.mark.parametrize("name", ["mini", "looks_at_all"])
def test_as_many_calls_as_a_message_may_have_are_rendered(name):
    tokenizer = tokenizer_with("mini") if name == "mini" else with_template(template_text(name))
    assert encode(chat(called(1, MOST_CALLS, "r")), tokenizer, 131_072)


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
def test_a_message_has_only_so_many_calls(api):
    count, body = MOST_CALLS + 1, {"model": "m", "max_tokens": 1}
    if api == "chat":
        body = {"messages": called(1, count)}
    elif api == "messages":
        uses = [{"type": "tool_use", "id": str(i), "name": "f", "input": {}} for i in range(count)]
        body["messages"] = [USER, {"role": "assistant", "content": uses}, USER]
    else:
        call = {"type": "function_call", "name": "f", "arguments": "{}"}
        body = {"input": [USER, *(call | {"call_id": str(i)} for i in range(count))]}
    with pytest.raises(ApiError, match=f"at most {MOST_CALLS} items") as refusal:
        chat_of_body(api, body)
    assert refusal.value.status == 400


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ messages[0].pop('role') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].get.__self__.clear() }}",
        "{{ namespace(a=1).__class__.__mro__ }}",
        "{{ namespace(a=1).update(b=2) }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{% for m in messages %}{{ loop.__class__.__mro__ }}{% endfor %}",
        "{% for m in messages %}{{ loop._iterator.gi_frame }}{% endfor %}",
    ],
)
def test_templates_stay_in_their_sandbox(text):
    messages = [dict(USER)]
    with pytest.raises(UserError, match="unsafe"):
        ChatTemplate(text).render(messages, {})
    assert messages == [USER]


def test_a_namespace_is_what_jinja_has():
    text = (
        "{% set found = namespace(items=1, get=2) %}{% set found.other = 3 %}"
        "{{ found.items }}{{ found.get }}{{ found['other'] }}{{ found.none is undefined }}"
    )
    assert ChatTemplate(text).render([], {}) == "123True"


def test_what_nobody_waits_for_is_not_rendered_to_its_end(monkeypatch):
    """A client that left: its rendering would hold the thread of all large bodies."""
    monkeypatch.setattr("targets.chat_template.MOST_STEPS", 10**12)
    template = ChatTemplate(template_text("looks_at_all"))
    begun = threading.Event()

    def endless() -> None:
        begun.set()
        template.render([USER] * 50_000, {})

    async def main() -> None:
        lanes = Lanes()
        left = asyncio.create_task(lanes.prepare(MEDIUM_BYTES + 1, endless))
        await asyncio.to_thread(begun.wait, 60)
        left.cancel()
        await asyncio.wait_for(lanes.prepare(MEDIUM_BYTES + 1, len, ""), 10)
        assert left.cancelled()

    asyncio.run(main())


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


def test_one_keys_uploads_leave_room_for_others():
    lanes = Lanes()
    held = [lanes.admitted(None, "1") for _ in range(LARGE_OF_A_KEY)]
    for one in held:
        one.__enter__()
    with pytest.raises(ApiError, match="of this API key"), lanes.admitted(None, "1"):
        pass
    with lanes.admitted(1, "1"), lanes.admitted(None, "2"):
        pass


@pytest.mark.parametrize(("size", "most"), [(1, SMALL_WAITING), (MEDIUM_BYTES, MEDIUM_WAITING)])
def test_only_so_many_smaller_requests_wait(size, most):
    async def main() -> None:
        lanes, release = Lanes(), threading.Event()
        works = [asyncio.create_task(lanes.prepare(size, release.wait, 60)) for _ in range(most)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refusal:
            await lanes.prepare(size, len, "")
        assert refusal.value.status == 429 and "Retry-After" in refusal.value.headers
        works.pop().cancel()  # it waits behind the others
        await asyncio.sleep(0)
        one_more = asyncio.create_task(lanes.prepare(size, len, ""))
        await asyncio.sleep(0)
        release.set()
        assert await one_more == 0 and all(await asyncio.gather(*works))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("route", "body", "form"),
    [
        ("chat/completions", {"messages": [USER]}, ("error", "code", "queue_full")),
        ("completions", {"prompt": "ab"}, ("error", "code", "queue_full")),
        ("responses", {"input": "ab"}, ("error", "code", "queue_full")),
        (
            "messages",
            {"model": "m", "messages": [USER], "max_tokens": 4},
            ("error", "type", "rate_limit_error"),
        ),
    ],
)
def test_a_full_lane_is_a_429_in_the_form_of_its_api(server, monkeypatch, route, body, form):
    monkeypatch.setattr("serve.lanes.SMALL_WAITING", 0)
    reply = server.post(route, **body)
    assert reply.status_code == 429 and "Retry-After" in reply.headers
    assert reply.json()[form[0]][form[1]] == form[2]


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
