"""Load, clients that disconnect, requests and engines that fail: other requests go on, and metrics
count it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from serve import generation
from tests.support.serving import (
    CHAT,
    LONG,
    MODEL,
    TOKENIZER,
    ServedTarget,
    Server,
    plain,
    plain_text,
    serving,
)


@pytest.fixture(scope="module")
def slow() -> Iterator[Server]:
    """One slot, one place in the queue, 10 ms per cycle."""
    with serving(ServedTarget(slots=1, pause=0.01, max_len=6000), max_waiting=1) as running:
        yield running


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(slow, stream, path):
    said = {"prompt": "abc"} if path == "completions" else {"messages": CHAT}
    body = {**said, "max_tokens": 5000, "ignore_eos": True, "seed": LONG}
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


def test_tokens_without_text_are_a_silence_too(monkeypatch):
    """However fast they come."""
    monkeypatch.setattr("serve.generation.PING_SECONDS", 0.2)
    monkeypatch.setattr("serve.stream.PlainOutput.feed", lambda self, token: [])
    with serving(ServedTarget(slots=1, pause=0.02), k=0) as running:
        body = {"prompt": "abc", "max_tokens": 60, "ignore_eos": True, "stream": True}
        reply = running.post("completions", **body)
    assert reply.text.count(": ping") > 2 and reply.text.endswith("data: [DONE]\n\n")


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


def test_each_choice_of_a_dead_engine_counts_as_an_error():
    with serving(ServedTarget(slots=2)) as running:
        running.target.broken = True
        assert running.post("completions", prompt="abc", n=4, max_tokens=30).status_code == 500
        found = running.metrics()
    labels = f'{{engine="0",finished_reason="%s",model_name="{MODEL}"}}'
    ends = [found[f"vllm:request_success_total{labels % end}"] for end in ("error", "abort")]
    assert ends == [4, 0]


def test_shutdown_tells_whoever_still_waits():
    with serving(ServedTarget(slots=1, pause=0.02)) as running, ThreadPoolExecutor(1) as pool:
        body = {"prompt": "abc", "max_tokens": 500, "ignore_eos": True}
        waiting = pool.submit(running.post, "completions", **body)
        while not running.runner.running:
            time.sleep(0.01)
        running.runner.close()
        assert waiting.result().status_code == 503
        assert "shutting down" in waiting.result().json()["error"]["message"]


REQUESTS = (
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
)


def test_requests_that_only_score_are_counted(server):
    """As lm-eval sends them; beside choices a scoring sequence is none of its own."""
    labels = f'engine="0",model_name="{MODEL}"'
    ended = f'vllm:request_success_total{{engine="0",finished_reason="stop",model_name="{MODEL}"}}'
    read = f"vllm:prompt_tokens_total{{{labels}}}"
    waited = f"vllm:request_queue_time_seconds_count{{{labels}}}"
    before = server.metrics()
    ask = {"prompt": ["abab", "a"], "echo": True, "logprobs": 1, "max_tokens": 0}
    assert server.post("completions", **ask).status_code == 200
    after = server.metrics()
    assert after[read] - before[read] == 7  # with a beginning each
    assert after[ended] - before[ended] == 2 == after[waited] - before[waited]
    assert server.post("completions", prompt="abab", prompt_logprobs=1, max_tokens=3).is_success
    last = server.metrics()
    assert last[read] - after[read] == 5
    assert last[waited] - after[waited] == 1


def test_the_first_tokens_time_begins_when_the_request_came(server, monkeypatch):
    """Not when it was ready for the engine: reading and encoding it are part of the wait."""
    name = f'vllm:time_to_first_token_seconds_sum{{engine="0",model_name="{MODEL}"}}'
    before, plan = server.metrics()[name], generation.plan
    monkeypatch.setattr(generation, "plan", lambda *given: time.sleep(0.5) or plan(*given))
    assert server.post("completions", prompt="ab", max_tokens=1).is_success
    assert server.metrics()[name] - before >= 0.5


def test_metrics_have_vllms_names_and_the_engines_counts(server):
    labels = f'{{engine="0",model_name="{MODEL}"}}'
    before, counts_before = server.metrics(), server.runner.engine.acceptance.accepted
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
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", *REQUESTS):
        assert grown(f"vllm:{name}_count") == 1
    assert grown("vllm:request_prompt_tokens_sum") == 15
    assert grown("vllm:request_generation_tokens_sum") == 50
    assert grown("vllm:request_success_total", 'finished_reason="length",') == 1
    assert after[f"vllm:num_requests_running{labels}"] == 0
    assert after[f"vllm:num_requests_waiting{labels}"] == 0
    # OpenAI's prediction counts are of a request's own `prediction`: there was none
    details = reply.usage.completion_tokens_details
    assert details.accepted_prediction_tokens is details.rejected_prediction_tokens is None
    told = reply.model_extra["metrics"]["speculative_decoding"]
    assert told["draft_tokens"] == grown("vllm:spec_decode_num_draft_tokens_total")
    assert told["accepted_tokens"] == counts.accepted - counts_before
