"""The server as its clients see it: answers and streams are what plain decoding gives."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from drafters.none.host import NoDrafter
from serve.answer import event
from specdec.core.types import Sampling
from tests.support.fakes_text import ALPHABET, EOS, CharTokenizer
from tests.support.serving import (
    CHAT,
    CHAT_IDS,
    LONG,
    MODEL,
    TOKENIZER,
    ServedTarget,
    plain,
    plain_text,
    serving,
)


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


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_each_chunk_has_the_usage_so_far(server, route):
    ask = {"prompt": "abc"} if route == "completions" else {"messages": CHAT}
    wish = {"include_usage": True, "continuous_usage_stats": True}
    ask |= {"max_tokens": 30, "seed": LONG, "ignore_eos": True}
    reply = server.post(route, **ask, stream=True, stream_options=wish)
    *chunks, done = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    used = [json.loads(chunk)["usage"] for chunk in chunks]
    counts = [usage["completion_tokens"] for usage in used]
    assert done == "[DONE]" and len({usage["prompt_tokens"] for usage in used}) == 1
    assert counts == sorted(counts) and counts[0] == 1 and counts[-2:] == [30, 30]
    wish["include_usage"] = False  # as vLLM: the other one goes with it
    reply = server.post(route, **ask, stream=True, stream_options=wish)
    assert '"usage"' not in reply.text


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


def test_an_event_is_one_line_to_every_client():
    """Python's `splitlines`, as in httpx, also cuts at ends of lines that are none to JSON."""
    body = {"text": "a\u2028b\u2029c\x85d\né"}
    (data,) = event(body).decode().rstrip("\n").splitlines()
    assert json.loads(data.removeprefix("data: ")) == body and "é" in data


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


@pytest.mark.parametrize("stream", [False, True])
def test_half_characters_have_their_own_bytes(mini_server, stream):
    """Of the chosen tokens and of the alternatives: put together they are the text."""
    said = "\u20ac\U0001f600 \u00e9"
    ask: Any = {"model": "mini", "messages": CHAT, "logprobs": True, "top_logprobs": 20}
    ask["extra_body"] = {"structured_outputs": {"choice": [said]}}
    reply = mini_server.openai.chat.completions.create(**ask, stream=stream)
    choices = [c for chunk in reply for c in chunk.choices] if stream else reply.choices
    tokens = [t for choice in choices if choice.logprobs for t in choice.logprobs.content]
    assert bytes(byte for token in tokens for byte in token.bytes) == said.encode()
    assert len(tokens) > len(said) and any(t.token == "\ufffd" for t in tokens)
    for told in (one for token in tokens for one in token.top_logprobs):
        assert told.bytes is not None
        assert bytes(told.bytes).decode(errors="replace").startswith(told.token[:1])


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
    with serving(ServedTarget(slots=2), Spy(), tokenizer=tokenizer, api_keys=["geheim"]) as running:
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
