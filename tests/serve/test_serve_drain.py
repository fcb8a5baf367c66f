"""Shutdown of a server: running requests may finish, new ones get 503, the rest an error."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import openai
import pytest

from tests.support import cheap
from tests.support.commands import refused, wait_until_ready
from tests.support.serving import LONG, MODEL, ServedTarget, Server, plain_text, serving

COUNT = 4
TOKENS = 32
BODY = {"prompt": "abc", "max_tokens": 40, "seed": LONG}
ENDLESS = {"prompt": "abc", "max_tokens": 5000, "ignore_eos": True}


def patient(seconds: float) -> bool:
    """No second signal."""
    time.sleep(seconds)
    return False


def running(server: Server, count: int) -> None:
    deadline = time.monotonic() + 20
    while server.runner.running < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def draining(
    server: Server, seconds: float, hurried: Callable[[float], bool] = patient
) -> Iterator[list[bool]]:
    """Drain beside the block; afterwards the list holds whether the engine ended."""
    ended: list[bool] = []
    thread = threading.Thread(target=lambda: ended.append(server.web.drain(seconds, hurried)))
    thread.start()
    while not httpx.get(f"{server.url}/ready").is_error:
        time.sleep(0.01)
    yield ended
    thread.join(30)


@pytest.mark.parametrize("stream", [True, False])
def test_what_runs_may_end_and_new_requests_are_sent_elsewhere(stream):
    with serving(ServedTarget(slots=2, pause=0.05)) as server, ThreadPoolExecutor() as pool:
        waiting = pool.submit(server.post, "completions", **BODY, stream=stream)
        running(server, 1)
        with draining(server, 30) as ended:
            refused = server.post("completions", **BODY)
            ready, health = (httpx.get(f"{server.url}/{at}") for at in ("ready", "health"))
        assert ended == [True]
        answer = waiting.result()
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "draining"
    assert refused.json()["error"]["type"] == "server_error"
    assert ready.status_code == health.status_code == 503
    assert health.json()["status"] == "draining" and "1 running" in health.json()["doing"]
    assert text_of(answer, stream) == plain_text("abc", 40, LONG)


def text_of(answer: httpx.Response, stream: bool) -> str:
    assert answer.status_code == 200
    if not stream:
        return answer.json()["choices"][0]["text"]
    *events, done = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def hurry(seconds: float) -> bool:
    return True


@pytest.mark.parametrize(("seconds", "hurried"), [(0.2, patient), (60, hurry), (math.inf, hurry)])
def test_what_does_not_end_in_time_is_told(seconds, hurried):
    with serving(ServedTarget(slots=2, pause=0.02, max_len=6000)) as server:
        with ThreadPoolExecutor() as pool:
            whole = pool.submit(server.post, "completions", **ENDLESS)
            stream = pool.submit(server.post, "completions", **ENDLESS, stream=True)
            running(server, 2)
            assert server.web.drain(seconds, hurried)
        assert whole.result().status_code == 503
        assert "shutting down" in whole.result().json()["error"]["message"]
        assert int(whole.result().headers["retry-after"]) >= 1
        *_, error, done = stream.result().text.strip().split("\n\n")
        assert done == "data: [DONE]"
        assert "shutting down" in json.loads(error.removeprefix("data: "))["error"]["message"]


@pytest.mark.parametrize("seconds", ["nan", "-1"])
def test_a_time_that_is_none_is_refused_first(capsys, seconds):
    line = refused(capsys, "serve", "--model", "/nowhere", "--drain-seconds", seconds)
    assert "drain-seconds must be 0 or more" in line and seconds in line


def test_openais_client_raises_on_the_last_event():
    with serving(ServedTarget(slots=1, pause=0.2, max_len=6000)) as server:
        stream = server.openai.completions.create(
            model=MODEL, prompt="abc", max_tokens=5000, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        assert server.web.drain(0, patient)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)


def test_a_client_that_does_not_read_holds_nothing_up(monkeypatch, caplog):
    monkeypatch.setattr("serve.server.LAST_WORDS", 0.3)
    with serving(ServedTarget(slots=1, max_len=6000)) as server:
        deaf = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        body = json.dumps({**ENDLESS, "stream": True, "logprobs": 5}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        deaf.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        running(server, 1)
        server.wait_until_idle()
        assert server.web.drain(0.1, patient)
    deaf.close()
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_loses_no_stream(worded, number):
    with served(worded) as (server, url):
        alone = [stream_text(url, i) for i in range(COUNT)]
        began = threading.Barrier(COUNT + 1)
        with ThreadPoolExecutor(COUNT) as pool:
            streams = [pool.submit(stream_text, url, i, began) for i in range(COUNT)]
            began.wait(60)
            server.send_signal(number)
            while (ready := httpx.get(f"{url}/ready")).status_code == 200:
                time.sleep(0.01)
            refused = httpx.post(f"{url}/v1/completions", json={"prompt": "x"})
            assert [stream.result() for stream in streams] == alone
        _, err = server.communicate(timeout=60)
    assert ready.json()["status"] == "draining" and refused.status_code == 503
    assert server.returncode == {signal.SIGTERM: -15, signal.SIGINT: 130}[number]
    assert "Traceback" not in err and "draining" in err
    assert err.count("INFO specdec.access: POST /v1/completions 200 ") == 2 * COUNT
    assert err.count("INFO specdec.access: POST /v1/completions 503 ") == 1


def test_a_second_signal_ends_it_at_once(worded):
    with served(worded, "--drain-seconds", "600") as (server, url):
        began = threading.Barrier(2)
        with ThreadPoolExecutor() as pool:
            stream = pool.submit(stream_text, url, 0, began, {"max_tokens": 500, "n": 100})
            began.wait(60)
            server.send_signal(signal.SIGTERM)
            while httpx.get(f"{url}/ready").status_code == 200:
                time.sleep(0.01)
            server.send_signal(signal.SIGTERM)
            with pytest.raises(KeyError):  # its last event is no choice
                stream.result()
        _, err = server.communicate(timeout=60)
    assert server.returncode == -15 and "Traceback" not in err


@contextmanager
def served(model, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    arguments = ["--model", str(model), "--port", port, "--slots", str(COUNT), "--k", "3"]
    arguments += ["--max-len", "512", "--drafter", "ngram"]
    programs = os.environ["JAX_COMPILATION_CACHE_DIR"]  # the session's
    flags = {"XLA_FLAGS": cheap.FLAGS, "JAX_PLATFORMS": "cpu"}
    server = subprocess.Popen(
        [sys.executable, "-m", "specdec", "serve", *arguments, "--cache", programs, *options],
        env=os.environ | flags,
        text=True,
        stderr=subprocess.PIPE,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(server, url)
        yield server, url
    finally:
        server.kill()
        server.communicate()


def stream_text(
    url: str, seed: int, began: threading.Barrier | None = None, more: dict | None = None
) -> str:
    body = {"prompt": "def f(", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0}
    body |= {"seed": seed, "stream": True, **(more or {})}
    text, done = "", False
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                if began is not None and not text:
                    began.wait(60)
                text += json.loads(line[6:])["choices"][0]["text"] or " "
    assert done
    return text
