"""The prefix cache as clients see it: usage, salts, keys, and what reads nothing from it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

from serve.chat_schema import ChatRequest
from serve.reuse import reuse_of
from serve.schema import CompletionRequest, parse
from specdec.core.types import Reuse
from targets import mini
from targets.tokenizer import load_tokenizer
from tests.support.fakes_snapshots import UNIT, cached_engine
from tests.support.serving import TOKENIZER, ServedTarget, Server, served, serving_mini

KEYS = ["eins", "zwei"]
PROMPT = "abcdefghij" * 3
WHOLE = 3 * UNIT
"""Of the prompt's 31 tokens, those of full chunks."""


@pytest.fixture
def server() -> Iterator[Server]:
    with served(cached_engine(target=ServedTarget(slots=2, chunk=4)), "fake", **OPTIONS) as running:
        yield running


OPTIONS = {"tokenizer": TOKENIZER, "k": 0, "api_keys": KEYS}

KEY = {"Authorization": f"Bearer {KEYS[0]}"}


def cached(server: Server, prompt: str = PROMPT, key: str = "eins", **fields) -> int:
    body = {"prompt": prompt, "max_tokens": 2, "seed": 1} | fields
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_usage_tells_what_was_cached_and_metrics_count_it(server):
    assert [cached(server), cached(server), cached(server, PROMPT + "xyz")] == [0, WHOLE, WHOLE]
    metrics = server.metrics()
    labels = '{engine="0",model_name="fake"}'
    assert metrics[f"vllm:prefix_cache_queries_total{labels}"] == 31 + 31 + 34
    assert metrics[f"vllm:prefix_cache_hits_total{labels}"] == 2 * WHOLE


def test_the_last_chunk_of_a_stream_tells_it_too(server):
    cached(server)
    stream = server.openai.completions.create(
        model="fake",
        prompt=PROMPT,
        max_tokens=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    last = list(stream)[-1]
    assert last.usage.prompt_tokens_details.cached_tokens == WHOLE


def test_of_several_choices_and_prompts_each_prompt_counts_once(server):
    assert cached(server, n=3) == 0
    assert cached(server, [PROMPT, "z" * 40], n=2) == WHOLE


def test_another_salt_shares_nothing(server):
    asked = [None, "a", "b", "a", None]
    assert [cached(server, cache_salt=salt) for salt in asked] == [0, 0, 0, WHOLE, WHOLE]


def test_another_key_shares_nothing(server):
    assert [cached(server, key=key) for key in (*KEYS, *KEYS)] == [0, 0, WHOLE, WHOLE]


def test_a_salt_cannot_pass_for_another_key(server):
    cached(server, key="zwei", cache_salt="x")
    for salt in ("x", 'x", "', '"1", "x"'):
        assert cached(server, cache_salt=salt) == 0


def test_keys_may_share():
    engine = cached_engine(target=ServedTarget(slots=2, chunk=4))
    with served(engine, "fake", **OPTIONS, share_cache=True) as server:
        assert [cached(server, key=key) for key in KEYS] == [0, WHOLE]


def test_a_request_may_ask_for_none_of_it(server):
    assert cached(server, cache_prompt=False) == 0
    assert cached(server, cache_prompt=True) == 0  # nothing was left
    assert cached(server, cache_prompt=False) == 0


@pytest.mark.parametrize("expected", [{"echo": True}, {"prompt_logprobs": 1}])
def test_what_tells_of_the_prompt_reads_nothing(expected):
    request = parse(CompletionRequest, _json({"prompt": PROMPT} | expected))
    assert reuse_of(request, [1, 2], TOKENIZER, "") is None


@pytest.mark.parametrize("bad", [{"cache_salt": ""}, {"cache_salt": 3}, {"cache_prompt": "no"}])
def test_mistakes_are_refused(server, bad):
    headers = {"Authorization": "Bearer eins"}
    body = {"prompt": PROMPT} | bad
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == next(iter(bad))


def _json(body: dict) -> bytes:
    return httpx.Request("POST", "http://x", json=body).content


def test_later_prompts_part_around_the_latest_user_message():
    tokenizer = load_tokenizer(mini.path("mini"))
    chat = [("system", "short"), ("user", "hello"), ("assistant", "hi"), ("user", "again")]
    messages = [{"role": role, "content": text} for role, text in chat]
    request = parse(ChatRequest, _json({"messages": messages}))
    ids = tokenizer.encode_chat(messages)
    reuse = reuse_of(request, ids, tokenizer, "1")
    assert reuse is not None
    begin, end = reuse.partings
    assert tokenizer.decode(ids[begin:end], skip_special=False) == "<|turn>user\nagain<turn|>\n"
    assert reuse == Reuse('["1", null]', (begin, end))
    plain = parse(CompletionRequest, _json({"prompt": "x"}))
    assert reuse_of(plain, ids, tokenizer, "").partings == ()


def test_a_chat_of_two_turns_says_what_it_says_without_a_cache():
    """mini itself, over HTTP: the second turn is resumed, and the text is the same."""
    told = {}
    for reuse in (True, False):
        with serving_mini("ngram", reuse=reuse) as server:
            messages = [{"role": "user", "content": "def add(a, b):\n    return a + b\n" * 12}]
            answers = []
            for _ in range(2):
                body = {"messages": messages, "max_tokens": 24, "logprobs": True, "seed": 3}
                answer = server.post("chat/completions", **body).json()
                answers.append((answer["choices"], answer["usage"]["prompt_tokens_details"]))
                messages = [*messages, answer["choices"][0]["message"] | {"content": "ok"}]
                messages.append({"role": "user", "content": "and now subtract"})
            told[reuse] = answers
    assert [choices for choices, _ in told[True]] == [choices for choices, _ in told[False]]
    counts = [details["cached_tokens"] for _, details in told[True]]
    assert counts[0] == 0 and counts[1] >= 128
    assert all(details["cached_tokens"] == 0 for _, details in told[False])


class SlowReader(ServedTarget):
    """Takes its time for each chunk of a prompt."""

    def prefill(self, seq, start, stop):
        time.sleep(0.1)
        return super().prefill(seq, start, stop)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_gives_up_while_its_prompt_is_read_gets_further_next_time(stream):
    engine = cached_engine(target=SlowReader(slots=2, chunk=4))
    body = {"prompt": "abcde" * 25, "max_tokens": 2, "stream": stream}
    with served(engine, "fake", **OPTIONS) as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=body, headers=KEY, timeout=2)
        server.wait_until_idle()
        assert cached(server, body["prompt"]) > 0
