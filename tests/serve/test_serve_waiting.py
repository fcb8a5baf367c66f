"""The log and the metrics have the time that a request waited for a slot, and 499 for a client that
left."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from tests.support.serving import EOS, MODEL, ServedTarget, Server, serving
from tests.support.until import until

PAUSE_SECONDS = 0.01
"""Of a cycle."""
BODY = {"prompt": "ab", "max_tokens": 30, "ignore_eos": True}
WAIT_SECONDS = 0.3
HISTOGRAMS = ("queue", "prefill", "decode")


class Endless(ServedTarget):
    """Its texts never end, with whatever seed the server draws."""

    def _choose(self, seq, length):
        chosen = super()._choose(seq, length)
        return EOS + 1 if chosen == EOS else chosen


@pytest.fixture
def server() -> Iterator[Server]:
    """It has one slot."""
    with serving(Endless(slots=1, pause=PAUSE_SECONDS, max_len=6000), k=0) as running:
        yield running


@contextmanager
def busy(server: Server, tokens: int = 5000) -> Iterator[None]:
    """The slot is taken meanwhile, by a client that leaves in the middle of its answer."""
    body = BODY | {"max_tokens": tokens, "stream": True}
    url = f"{server.url}/v1/completions"
    headers = {"X-Request-Id": "first"}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
        lines = answer.iter_lines()  # its end would close the connection
        next(lines)
        yield


def line(caplog, request: str) -> str:
    """A request's line in the access log."""

    def found() -> list[str]:
        lines = (r.getMessage() for r in caplog.records if r.name == "specdec.access")
        return [line for line in lines if f" id={request} " in f"{line} "]

    until(lambda: bool(found()))
    (own,) = found()
    return own


def milliseconds(line: str, name: str) -> int:
    (value,) = re.findall(rf" {name}=(\d+)ms", line)
    return int(value)


def took(line: str) -> int:
    (value,) = re.findall(r" \d{3} (\d+) ms ", line)
    return int(value)


def counts(server: Server) -> dict[str, tuple[float, float]]:
    """Of each histogram its number of observations and their sum."""
    samples, labels = server.metrics(), f'{{engine="0",model_name="{MODEL}"}}'
    names = {part: f"vllm:request_{part}_time_seconds" for part in HISTOGRAMS}
    return {
        part: (samples[f"{name}_count{labels}"], samples[f"{name}_sum{labels}"])
        for part, name in names.items()
    }


def test_a_second_request_waits_for_the_only_slot(server, caplog):
    caplog.set_level(logging.INFO, "specdec.access")
    headers = {"X-Request-Id": "second"}
    with ThreadPoolExecutor(1) as pool:
        with busy(server):
            url = f"{server.url}/v1/completions"
            second = pool.submit(httpx.post, url, json=BODY, headers=headers, timeout=60)
            until(lambda: server.runner.waiting == 1)
            time.sleep(WAIT_SECONDS)
        assert second.result().status_code == 200
    own = line(caplog, "second")
    queued, first = (milliseconds(own, name) for name in ("queue", "first"))
    assert 1000 * WAIT_SECONDS <= queued <= first < took(own)
    assert milliseconds(line(caplog, "first"), "queue") < 100
    found = counts(server)
    assert [count for count, _ in found.values()] == [2, 2, 2]
    assert found["queue"][1] == pytest.approx(queued / 1000, abs=0.1)
    assert found["decode"][1] > 29 * PAUSE_SECONDS


def test_a_client_that_left_while_it_waited_is_counted_with_its_wait(server, caplog):
    caplog.set_level(logging.INFO, "specdec.access")
    with busy(server):
        with pytest.raises(httpx.ReadTimeout):
            headers = {"X-Request-Id": "gone"}
            httpx.post(
                f"{server.url}/v1/completions", json=BODY, headers=headers, timeout=WAIT_SECONDS
            )
        own = line(caplog, "gone")
        found = counts(server)
    assert (
        " 499 " in own and milliseconds(own, "queue") >= 900 * WAIT_SECONDS and "first=" not in own
    )
    assert found["queue"][0] == 2 and found["queue"][1] >= 0.9 * WAIT_SECONDS
    assert found["prefill"][0] == 1


@pytest.mark.parametrize("route", ["completions", "chat/completions", "messages", "responses"])
def test_a_client_that_left_its_stream_is_logged_as_499(server, caplog, route):
    caplog.set_level(logging.INFO, "specdec.access")
    said = [{"role": "user", "content": "ab"}]
    limit = "max_output_tokens" if route == "responses" else "max_tokens"
    field = {"completions": "prompt", "responses": "input"}.get(route, "messages")
    body = {"model": MODEL, field: "ab" if field != "messages" else said, limit: 5000}
    body |= {"stream": True, "temperature": 0}
    url, headers = f"{server.url}/v1/{route}", {"X-Request-Id": "gone"}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
        next(answer.iter_lines())
        assert answer.status_code == 200
    own = line(caplog, "gone")
    assert f"/v1/{route} 499 " in own and "prompt=" in own
    labels = f'{{engine="0",finished_reason="abort",model_name="{MODEL}"}}'
    assert server.metrics()[f"vllm:request_success_total{labels}"] == 1
    server.wait_until_idle()


def test_a_client_that_read_its_stream_is_logged_as_200(server, caplog):
    caplog.set_level(logging.INFO, "specdec.access")
    headers = {"X-Request-Id": "whole"}
    body = BODY | {"stream": True}
    httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert " 200 " in line(caplog, "whole")
