"""The whole house: the official client against a real server on the embedded model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.support.serving import Server

PROMPTS = [f"def function_{i}(items, count={i}):\n    " for i in range(16)]


@pytest.fixture
def client(mini_server: Server) -> openai.OpenAI:
    return mini_server.openai


def complete(client, i: int) -> str:
    answer = client.completions.create(
        model="mini", prompt=PROMPTS[i], max_tokens=12, temperature=0.8 * (i % 2), seed=i
    )
    return answer.choices[0].text


def test_sixteen_through_four_slots_equal_their_lone_runs(client):
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda i: complete(client, i), range(16)))
    assert [complete(client, i) for i in range(16)] == together


def test_a_streamed_chat_equals_the_whole_one(client):
    request = {
        "model": "mini",
        "messages": [{"role": "user", "content": "Write a function that adds two numbers."}],
        "max_tokens": 40,
        "temperature": 0.8,
        "seed": 7,
    }
    whole = client.chat.completions.create(**request)
    pieces = list(
        client.chat.completions.create(
            **request, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
    assert text == whole.choices[0].message.content
    assert pieces[-1].usage == whole.usage and whole.usage.completion_tokens <= 40
    reason = [p.choices[0].finish_reason for p in pieces if p.choices][-1]
    assert reason == whole.choices[0].finish_reason


def test_a_stop_string_cuts_the_text(client):
    request = {"model": "mini", "prompt": PROMPTS[0], "max_tokens": 60, "temperature": 0}
    whole = client.completions.create(**request).choices[0].text
    stop = whole[10:14]
    cut = client.completions.create(**request, stop=[stop]).choices[0]
    assert cut.text == whole[: whole.index(stop)] and cut.finish_reason == "stop"
