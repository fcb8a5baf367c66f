"""The server as its clients see it: a real socket, the official openai client, a fake target."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import uvicorn
from hypothesis import given, strategies as st

from drafters.ngram.host import NgramDrafter
from drafters.none.host import NoDrafter
from serve.api import create_app
from serve.runner import EngineRunner, Update
from serve.stream import ChoiceText, held_back
from specdec.cycle import host_cycle
from specdec.engine import Engine
from specdec.protocols import Drafter
from specdec.types import LogprobRows, Sampling, Sequence, Step, TokenLogprob
from tests.fakes import FakeTarget
from tests.fakes_text import ALPHABET, EOS, CharTokenizer, HalvesTokenizer

MODEL = "fake"
TOKENIZER = CharTokenizer()
POISON = ALPHABET.index("Z")


class ServedTarget(FakeTarget):
    """The fake target with log-probabilities that can be calculated, a pace, and two faults."""

    def __init__(self, pause: float = 0.0, **kwargs) -> None:
        super().__init__(vocab=len(ALPHABET), **kwargs)
        self.pause, self.poisoned, self.broken = pause, False, False

    def prefill(self, seq, start, stop):
        if self.poisoned and POISON in seq.tokens[start:stop]:
            raise MemoryError("no room for this one")
        return self._with_logprobs(super().prefill(seq, start, stop))

    def verify(self, seqs, draft):
        time.sleep(self.pause)
        if self.broken:
            raise RuntimeError("device lost")
        return self._with_logprobs(super().verify(seqs, draft))

    def _with_logprobs(self, step: Step) -> Step:
        ids = (step.chosen[..., None] + np.arange(20)) % self.vocab
        values = -(step.chosen[..., None] / 10 + np.arange(20)).astype(np.float32)
        return Step(step.chosen, None, LogprobRows(values[..., 0], ids, values))


@dataclass
class Server:
    url: str
    runner: EngineRunner
    target: ServedTarget
    openai: openai.OpenAI

    def post(self, path: str, **body) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/{path}", json=body, timeout=20)

    def metrics(self) -> dict[str, float]:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + 5
        while self.runner.running or self.runner.waiting:
            assert time.monotonic() < deadline, "a slot was never freed"
            time.sleep(0.01)


@contextlib.contextmanager
def serving(
    target: ServedTarget,
    drafter: Drafter | None = None,
    k: int = 4,
    max_waiting: int = 64,
    **options: Any,
) -> Iterator[Server]:
    drafter = drafter or NgramDrafter()
    runner = EngineRunner(Engine(target, drafter, host_cycle(target, drafter, k), max_waiting))
    app = create_app(runner, model_name=MODEL, k=k, **{"tokenizer": TOKENIZER} | options)
    config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        key = options.get("api_key", "none")
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=20)
        try:
            with client:
                yield Server(url, runner, target, client)
        finally:
            server.should_exit = True
            thread.join()
    assert not runner._thread.is_alive()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(ServedTarget(slots=4)) as running:
        yield running


@pytest.fixture(scope="module")
def slow() -> Iterator[Server]:
    """One slot, one place in the queue, 10 ms per cycle."""
    with serving(ServedTarget(slots=1, pause=0.01, max_len=6000), max_waiting=1) as running:
        yield running


def plain(prompt: list[int], max_tokens: int, seed: int, stop_ids=(EOS,)) -> list[int]:
    """What plain decoding gives one lone request: the oracle."""
    target = FakeTarget(slots=1, vocab=len(ALPHABET))
    engine = Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 0))
    sampling, stops = Sampling(seed=seed), frozenset(stop_ids)
    seq = Sequence(list(prompt), sampling, max_tokens=max_tokens, stop_ids=stops)
    list(engine.run([seq]))
    return seq.tokens[seq.prompt_len :]


def plain_text(prompt: str, max_tokens: int, seed: int) -> str:
    return TOKENIZER.decode(plain(TOKENIZER.encode(prompt), max_tokens, seed))


LONG = next(seed for seed in range(99) if len(plain_text("abc", 40, seed)) == 40)
"""A seed with which nothing but the limit ends a completion of "abc"."""
CHAT = [{"role": "system", "content": "short"}, {"role": "user", "content": "hello"}]
CHAT_IDS = TOKENIZER.encode_chat(CHAT)


# The endpoints


def test_completion_is_what_plain_decoding_gives(server):
    reply = server.openai.completions.create(model=MODEL, prompt="abc", max_tokens=30, seed=5)
    tokens = plain(TOKENIZER.encode("abc"), 30, 5)
    assert reply.choices[0].text == TOKENIZER.decode(tokens)
    assert reply.choices[0].finish_reason == "length" and reply.object == "text_completion"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (4, len(tokens))
    assert reply.usage.total_tokens == 4 + len(tokens)


def test_completion_streams_the_same_text_in_several_chunks(server):
    ask = {"model": MODEL, "prompt": "abc", "max_tokens": 30, "seed": 5}
    stream = server.openai.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(c.choices[0].text for c in chunks) == plain_text("abc", 30, 5)
    assert len(chunks) > 5 and all(c.usage is None for c in chunks)
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert last.choices == [] and last.usage.completion_tokens == 30


def test_chat_whole_and_streamed(server):
    ask = {"model": MODEL, "messages": CHAT, "max_completion_tokens": 25, "seed": 3}
    expected = TOKENIZER.decode(plain(CHAT_IDS, 25, 3))
    reply = server.openai.chat.completions.create(**ask)
    assert reply.choices[0].message.content == expected
    assert reply.choices[0].message.role == "assistant"
    deltas = [c.choices[0] for c in server.openai.chat.completions.create(**ask, stream=True)]
    assert deltas[0].delta.role == "assistant" and deltas[0].delta.content == ""
    assert all(d.delta.role is None for d in deltas[1:])
    assert "".join(d.delta.content or "" for d in deltas) == expected
    assert deltas[-1].finish_reason == "length"


def test_a_stream_is_server_sent_events_that_end_in_done(server):
    reply = server.post("completions", prompt="abc", max_tokens=5, stream=True, seed=1)
    assert reply.headers["content-type"].startswith("text/event-stream")
    *events, done = [line for line in reply.text.split("\n\n") if line]
    assert done == "data: [DONE]"
    assert all(json.loads(event.removeprefix("data: "))["choices"] for event in events)


def test_a_stop_id_ends_the_text_and_is_not_in_it(server):
    seed = next(s for s in range(200) if EOS in plain(CHAT_IDS, 30, s, stop_ids=())[3:])
    tokens = plain(CHAT_IDS, 400, seed)
    ask = {"model": MODEL, "messages": CHAT, "seed": seed}
    reply = server.openai.chat.completions.create(**ask)  # no limit: whatever the context holds
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].message.content == TOKENIZER.decode(tokens[:-1])
    assert reply.usage.completion_tokens == len(tokens)
    ignored = server.openai.chat.completions.create(
        **ask, max_tokens=40, extra_body={"ignore_eos": True}
    )
    assert ignored.choices[0].finish_reason == "length"
    assert ignored.usage.completion_tokens == 40


def test_more_tokens_than_the_context_holds_end_at_its_end(server):
    body = {"prompt": "abc", "max_tokens": 10**12, "seed": LONG, "ignore_eos": True}
    reply = server.post("completions", **body).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["total_tokens"] == 512


def test_text_parts_and_developer_role_and_template_arguments(server):
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "developer", "content": "short"}, {"role": "user", "content": parts}]
    reply = server.openai.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=9,
        seed=2,
        extra_body={"chat_template_kwargs": {"thinking": 1}},
    )
    same = [{"role": "system", "content": "short"}, {"role": "user", "content": "hel\nlo"}]
    expected = plain(TOKENIZER.encode_chat(same, thinking=1), 9, 2)
    assert reply.choices[0].message.content == TOKENIZER.decode(expected)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_stop_strings_may_span_tokens(server, length):
    text = plain_text("abc", 40, LONG)
    stop = text[11 : 11 + length]
    expected = text[: text.index(stop)]
    ask = {"model": MODEL, "prompt": "abc", "max_tokens": 40, "seed": LONG, "stop": ["??", stop]}
    reply = server.openai.completions.create(**ask)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == (expected, "stop")
    assert reply.usage.completion_tokens == text.index(stop) + length
    chunks = list(server.openai.completions.create(**ask, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"
    server.wait_until_idle()


def test_several_prompts_and_choices_each_as_if_alone(server):
    ask = {"model": MODEL, "prompt": ["abc", "de"], "n": 3, "max_tokens": 20, "seed": 40}
    reply = server.openai.completions.create(**ask)
    expected = [plain_text(p, 20, 40 + j) for p in ("abc", "de") for j in range(3)]
    assert [c.text for c in reply.choices] == expected
    assert [c.index for c in reply.choices] == list(range(6))
    texts = [""] * 6
    for chunk in server.openai.completions.create(**ask, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected
    ids = server.openai.completions.create(
        model=MODEL, prompt=TOKENIZER.encode("de"), max_tokens=20, seed=40
    )
    assert ids.choices[0].text == expected[3]


def test_chat_logprobs_are_aligned_with_the_text(server):
    ask = {"model": MODEL, "messages": CHAT, "max_tokens": 20, "seed": 3}
    ask |= {"logprobs": True, "top_logprobs": 2}
    tokens = plain(CHAT_IDS, 20, 3)
    whole = server.openai.chat.completions.create(**ask).choices[0].logprobs.content
    streamed = [
        token
        for chunk in server.openai.chat.completions.create(**ask, stream=True)
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content
    ]
    for content in (whole, streamed):
        assert [t.token for t in content] == [ALPHABET[i] for i in tokens]
        assert [t.logprob for t in content] == pytest.approx([-i / 10 for i in tokens])
        assert all(len(t.top_logprobs) == 2 and t.bytes == [ord(t.token)] for t in content)
        assert all(t.top_logprobs[0].token == t.token for t in content)


def test_completion_logprobs_end_where_the_text_ends(server):
    text = plain_text("abc", 40, LONG)
    reply = server.openai.completions.create(
        model=MODEL, prompt="abc", max_tokens=40, seed=LONG, logprobs=3, stop=text[11:13]
    )
    logprobs = reply.choices[0].logprobs
    assert "".join(logprobs.tokens) == reply.choices[0].text == text[: text.index(text[11:13])]
    assert logprobs.text_offset == list(range(len(logprobs.tokens)))
    assert all(3 <= len(top) <= 4 for top in logprobs.top_logprobs)


def test_sampling_defaults_come_from_the_checkpoint():
    seen: list[Sampling] = []

    class Spy(NoDrafter):
        def reset(self, seq):
            seen.append(seq.sampling)

    tokenizer = CharTokenizer(defaults={"temperature": 0.5, "top_k": 7})
    with serving(ServedTarget(slots=2), Spy(), tokenizer=tokenizer, api_key="geheim") as running:
        assert running.post("completions", prompt="a").status_code == 401
        client = running.openai
        client.completions.create(model=MODEL, prompt="a", n=2)
        client.completions.create(
            model=MODEL,
            prompt="a",
            temperature=0.25,
            seed=8,
            logit_bias={"5": 3},
            extra_body={"top_k": -1, "min_p": 0.1},
        )
    first, second, third = seen
    assert (first.temperature, first.top_k, first.top_p) == (0.5, 7, 1.0)
    assert second.seed == (first.seed + 1) % 2**64 and first.seed != 0
    assert (third.temperature, third.top_k, third.min_p) == (0.25, 0, 0.1)
    assert third.seed == 8 and third.logit_bias == ((5, 3.0),)


def test_sixteen_at_once_through_four_slots_each_as_if_alone(server):
    lengths = [5 + 7 * (i % 5) for i in range(16)]

    async def ask_all() -> list[str]:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

        async def ask(i: int) -> str:
            wish = {"model": MODEL, "prompt": f"p{i}" * (i + 1), "max_tokens": lengths[i]}
            if i % 2:
                return (await client.completions.create(**wish, seed=i)).choices[0].text
            stream = await client.completions.create(**wish, seed=i, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

        async with client:
            return await asyncio.gather(*map(ask, range(16)))

    expected = [plain_text(f"p{i}" * (i + 1), lengths[i], i) for i in range(16)]
    assert asyncio.run(ask_all()) == expected


# Bad input


BAD = [
    ({"temperature": "warm"}, "temperature"),
    ({"temperature": -1}, "temperature must be in"),
    ({"top_p": 0}, "top_p must be in"),
    ({"top_k": -2}, "top_k must be"),
    ({"repetition_penalty": 0}, "repetition_penalty must be"),
    ({"presence_penalty": 3}, "presence_penalty must be"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"n": 0}, "n: "),
    ({"n": 100}, "at most 68"),
    ({"prompt": ""}, "prompt must not be empty"),
    ({"prompt": []}, "prompt must not be empty"),
    ({"prompt": [[]]}, "prompt must be"),
    ({"prompt": 7}, "prompt must be"),
    ({"prompt": None}, "prompt must be"),
    ({"prompt": [1, 999]}, "token id 999"),
    ({"prompt": [1, -1]}, "token id -1"),
    ({"prompt": [True]}, "prompt must be"),
    ({"prompt": "a" * 600}, "601 tokens but the context is 512"),
    ({"stop": ""}, "stop strings must have"),
    ({"stop": [1]}, "stop must be"),
    ({"stop": ["a"] * 17}, "stop takes at most 16"),
    ({"logit_bias": {"x": 1}}, "logit_bias keys"),
    ({"logit_bias": {"61": 1}}, "logit_bias holds token id 61"),
    ({"logit_bias": {"1" * 5000: 1}}, "logit_bias keys"),
    ({"prompt": ["a"] * 2000, "n": 128}, "send fewer prompts or a smaller n"),
    ({"stop_token_ids": [2**40]}, "stop_token_ids holds token id"),
    ({"stop_token_ids": 3}, "stop_token_ids"),
    ({"logprobs": 21}, "logprobs"),
    ({"seed": 2**64}, "seed"),
    ({"echo": True}, "echo is not supported"),
    ({"suffix": "x"}, "suffix is not supported"),
    ({"best_of": 2}, "best_of is not supported"),
    ({"stream_options": {"include_usage": True}}, "stream: true"),
]
BAD_CHAT = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text"),
    ({"messages": [{"role": "assistant", "content": "a"}]}, "chat template refuses"),
    ({"messages": [{"role": "user", "content": "a" * 600}]}, "context is 512"),
    ({"tools": [{"type": "function"}]}, "tools is not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
    ({"top_logprobs": 3}, "top_logprobs needs"),
    ({"chat_template_kwargs": {"messages": []}}, "may not set messages"),
    ({"chat_template_kwargs": {"self": 1}}, "may not set self"),
]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [("completions", {"prompt": "a"} | body, words) for body, words in BAD]
    + [("chat/completions", {"messages": CHAT} | body, words) for body, words in BAD_CHAT],
)
def test_bad_input_is_one_clear_sentence(server, path, body, words):
    reply = server.post(path, **body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"] and "\n" not in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "one JSON object"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"prompt": "a", "top_p": 1e999}', "top_p"),
        (b"{}", "prompt"),
    ],
)
def test_bodies_that_are_not_what_they_should_be(server, content, words):
    headers = {"Content-Type": "application/json"}
    reply = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers)
    assert reply.status_code == 400 and words in reply.json()["error"]["message"]


def test_status_codes_of_the_rest(server):
    def error(reply: httpx.Response) -> tuple[int, str | None]:
        body = reply.json()["error"]
        assert body["message"] and body["type"] == "invalid_request_error"
        return reply.status_code, body["code"]

    json_type = {"Content-Type": "application/json"}
    large = b'{"prompt": "' + b"a" * (9 * 2**20) + b'"}'
    completions = f"{server.url}/v1/completions"

    def in_parts() -> Iterator[bytes]:
        yield from (large[i : i + 2**20] for i in range(0, len(large), 2**20))

    assert error(httpx.post(completions, content=large, headers=json_type)) == (413, None)
    assert error(httpx.post(completions, content=in_parts(), headers=json_type)) == (413, None)
    assert error(httpx.post(completions, content=b"a=1")) == (415, None)
    assert error(httpx.get(completions)) == (405, None)
    assert error(httpx.get(f"{server.url}/v2/completions")) == (404, None)
    unknown = (404, "model_not_found")
    assert error(server.post("completions", model="gpt", prompt="a")) == unknown
    assert error(httpx.get(f"{server.url}/v1/models/gpt")) == unknown
    with pytest.raises(openai.BadRequestError, match="temperature"):
        server.openai.completions.create(model=MODEL, prompt="a", temperature=-3)


def test_models_version_health(server):
    models = server.openai.models.list().data
    assert [m.id for m in models] == [MODEL] and models[0].model_extra["max_model_len"] == 512
    assert server.openai.models.retrieve(MODEL).id == MODEL
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert re.match(r"\d+\.\d+", httpx.get(f"{server.url}/version").json()["version"])


# Load, disconnects, failures


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(slow, stream, path):
    body = {"prompt": "abc", "messages": CHAT, "max_tokens": 5000, "ignore_eos": True}
    body["seed"] = LONG
    with httpx.Client(base_url=slow.url) as client:
        if stream:
            with client.stream("POST", f"/v1/{path}", json={**body, "stream": True}) as reply:
                next(reply.iter_lines())
                assert slow.runner.running == 1
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"/v1/{path}", json=body, timeout=0.3)
    slow.wait_until_idle()
    assert slow.post("completions", prompt="abc", max_tokens=3).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_long_silence_is_filled_with_pings(monkeypatch, stream):
    monkeypatch.setattr("serve.generation.PING_SECONDS", 0.02)
    with serving(ServedTarget(slots=1, pause=0.1), k=0) as running:
        body = {"prompt": "abc", "max_tokens": 4, "seed": LONG, "stream": stream}
        reply = running.post("completions", **body)
    events = [json.loads(e[6:]) for e in reply.text.split("\n\n") if e.startswith("data: {")]
    bodies = events if stream else [reply.json()]
    assert "".join(b["choices"][0]["text"] for b in bodies) == plain_text("abc", 4, LONG)
    assert (": ping" in reply.text) == stream


def test_a_stop_string_frees_the_slot_at_once(slow):
    stop = plain_text("abc", 40, LONG)[5:8]
    body = {"prompt": "abc", "max_tokens": 5000, "ignore_eos": True, "seed": LONG, "stop": stop}
    assert slow.post("completions", **body).json()["choices"][0]["finish_reason"] == "stop"
    slow.wait_until_idle()


def test_a_full_queue_answers_429_and_the_others_go_on(slow):
    body = {"prompt": "abc", "max_tokens": 60, "ignore_eos": True, "seed": 1}
    with ThreadPoolExecutor(5) as pool:
        replies = list(pool.map(lambda _: slow.post("completions", **body), range(5)))
    codes = sorted(r.status_code for r in replies)
    assert codes == [200, 200, 429, 429, 429]
    expected = TOKENIZER.decode(plain(TOKENIZER.encode("abc"), 60, 1, stop_ids=()))
    for reply in replies:
        if reply.status_code == 429:
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.json()["error"]["type"] == "rate_limit_error"
        else:
            assert reply.json()["choices"][0]["text"] == expected


def test_one_request_that_fails_leaves_the_others_alone(server):
    server.target.poisoned = True
    try:
        with ThreadPoolExecutor(2) as pool:
            good = pool.submit(server.post, "completions", prompt="abc", max_tokens=30, seed=5)
            bad = server.post("completions", prompt="aZ", max_tokens=30)
        assert bad.status_code == 500 and "no room" in bad.json()["error"]["message"]
        assert good.result().json()["choices"][0]["text"] == plain_text("abc", 30, 5)
        assert httpx.get(f"{server.url}/health").status_code == 200
    finally:
        server.target.poisoned = False


def test_an_engine_that_dies_is_not_silent(caplog):
    with serving(ServedTarget(slots=1, pause=0.05)) as running:
        body = {"prompt": "abc", "max_tokens": 300, "ignore_eos": True}
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(running.post, "completions", **body)
            stream = running.openai.completions.create(
                model=MODEL,
                prompt="abc",
                max_tokens=300,
                stream=True,
                extra_body={"ignore_eos": True},  # else it may end before both are seen
            )
            deadline = time.monotonic() + 30
            while not (running.runner.running and running.runner.waiting):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            running.target.broken = True
            assert waiting.result().status_code == 500
            assert "device lost" in waiting.result().json()["error"]["message"]
            with pytest.raises(openai.APIError, match="device lost"):
                list(stream)
        assert httpx.get(f"{running.url}/health").status_code == 503
        after = running.post("completions", prompt="abc")
        assert after.status_code == 503 and after.json()["error"]["type"] == "server_error"
    assert "device lost" in caplog.text


def test_shutdown_tells_whoever_still_waits():
    with serving(ServedTarget(slots=1, pause=0.02)) as running, ThreadPoolExecutor(1) as pool:
        body = {"prompt": "abc", "max_tokens": 500, "ignore_eos": True}
        waiting = pool.submit(running.post, "completions", **body)
        while not running.runner.running:
            time.sleep(0.01)
        running.runner.close()
        assert waiting.result().status_code == 500
        assert "shutting down" in waiting.result().json()["error"]["message"]


def test_metrics_have_vllms_names_and_the_engines_counts(server):
    labels = f'{{engine="0",model_name="{MODEL}"}}'
    before = server.metrics()
    reply = server.openai.completions.create(
        model=MODEL, prompt="ababababababab", max_tokens=50, seed=9, extra_body={"ignore_eos": True}
    )
    after, counts = server.metrics(), server.runner.engine.acceptance
    assert after[f"vllm:spec_decode_num_drafts_total{labels}"] == counts.drafted_at[0] > 0
    assert after[f"vllm:spec_decode_num_draft_tokens_total{labels}"] == counts.drafted
    assert after[f"vllm:spec_decode_num_accepted_tokens_total{labels}"] == counts.accepted
    per_position = [
        after[
            "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            f'{{engine="0",model_name="{MODEL}",position="{i}"}}'
        ]
        for i in range(4)
    ]
    assert per_position == [counts.accepted_at[i] for i in range(4)]
    assert not any('position="4"' in name for name in after)

    def grown(name: str, more: str = "") -> float:
        key = f'{name}{{engine="0",{more}model_name="{MODEL}"}}'
        return after[key] - before[key]

    assert grown("vllm:prompt_tokens_total") == 15 and grown("vllm:generation_tokens_total") == 50
    assert grown("vllm:time_to_first_token_seconds_count") == 1
    assert grown("vllm:request_success_total", 'finished_reason="length",') == 1
    assert after[f"vllm:num_requests_running{labels}"] == 0
    assert after[f"vllm:num_requests_waiting{labels}"] == 0
    details = reply.usage.completion_tokens_details
    drafted = grown("vllm:spec_decode_num_draft_tokens_total")
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == drafted


# Text assembly


@given(
    st.lists(st.integers(2, 8), max_size=30),
    st.lists(st.integers(1, 4), min_size=30, max_size=30),
    st.lists(st.text("abcdefg", min_size=1, max_size=3), max_size=3),
    st.sampled_from(["stop", "length"]),
)
def test_text_never_depends_on_how_tokens_were_grouped(ids, sizes, stops, finish):
    """The oracle reads the whole text, token by token, and cuts at the first stop string."""
    whole = CharTokenizer().decode(ids)
    cuts = [whole[:n].find(s) for n in range(len(whole) + 1) for s in stops if s in whole[:n]]
    ends = [n for n in range(len(whole) + 1) if any(s in whole[:n] for s in stops)]
    choice, text, tokens, done = ChoiceText(CharTokenizer(), stops), "", [], None
    rest = [*ids, EOS] if finish == "stop" else ids
    groups = []
    for size in sizes:
        groups.append(rest[:size])
        rest = rest[size:]
    while groups and not groups[-1]:
        groups.pop()
    for i, group in enumerate(groups or [[]]):
        last = i == max(len(groups) - 1, 0)
        logprobs = tuple(TokenLogprob(-1.0, ()) for _ in group)
        update = Update(0, tuple(group), logprobs, finish if last else None)
        piece = choice.feed(update)
        text += piece.text
        tokens += piece.tokens
        done = piece.finish
        if done:
            break
    if not ends:
        assert (text, done) == (whole, finish)
    else:
        assert done == "stop" and whole.startswith(text) and len(text) in cuts
        assert not any(s in text for s in stops)
    assert "".join(t.text for t in tokens) == text
    assert [t.offset for t in tokens] == list(range(len(text)))


def test_half_a_character_waits_for_the_other_half():
    tokens = [ALPHABET.index(c) for c in "a.b.c".replace(".", "x")]
    choice = ChoiceText(HalvesTokenizer(), ["b"])
    logprobs = (TokenLogprob(-1.0, ()),)
    pieces = [choice.feed(Update(0, (t,), logprobs)) for t in tokens[:3]]
    assert [p.text for p in pieces] == ["", "a", ""]
    assert [len(p.tokens) for p in pieces] == [0, 2, 0]
    last = choice.feed(Update(0, (tokens[3],), logprobs))
    assert (last.text, last.tokens, last.finish) == ("", (), "stop")
    tail = ChoiceText(HalvesTokenizer()).feed(Update(0, tuple(tokens), logprobs * 5, "length"))
    assert (tail.text, len(tail.tokens)) == ("ab\ufffd", 5)


def test_held_back_is_the_longest_suffix_that_may_begin_a_stop():
    assert held_back("say </s", ["</s>", "s>"]) == 3
    assert held_back("abab", ["abac"]) == 2
    assert held_back("abc", ["x", "abd"]) == 0
    assert held_back("abc", []) == 0
