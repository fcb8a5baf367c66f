"""Requests have ids and lines in the log, HEAD is GET's head, no connection lasts for ever."""

from __future__ import annotations

import json
import logging
import socket
import time

import httpx
import pytest

from tests.support.serving import CHAT, ServedTarget, Server, serving

BODY = {"prompt": "secret", "max_tokens": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def server():
    with serving(ServedTarget(slots=2, max_len=6000)) as running:
        yield running


def lines(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "specdec.access"]


def logged(server: Server, caplog, *arguments, **options) -> tuple[httpx.Response, str]:
    with caplog.at_level(logging.INFO, "specdec.access"):
        answer = httpx.request(*arguments, **options)
        deadline = time.monotonic() + 5
        while not lines(caplog):  # it is written after the answer
            assert time.monotonic() < deadline
            time.sleep(0.01)
    (line,) = lines(caplog)
    return answer, line


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/completions", BODY),
        ("POST", "/v1/completions", BODY | {"stream": True}),
        ("POST", "/v1/completions", {"prompt": 3.5}),
        ("GET", "/v1/completions", None),
        ("GET", "/nowhere", None),
        ("GET", "/v1/models", None),
    ],
)
def test_an_id_comes_back_and_a_line_is_written(server, caplog, method, path, body):
    headers = {"X-Request-Id": "abc-1/7"}
    url = f"{server.url}{path}?key=hidden"
    answer, line = logged(server, caplog, method, url, json=body, headers=headers)
    assert answer.headers["x-request-id"] == "abc-1/7"
    assert line.startswith(f"{method} {path} {answer.status_code} ") and "id=abc-1/7" in line
    assert "hidden" not in line and "secret" not in line
    told = ("prompt=7 completion=5 cached=0 tau=" in line) == (body is not None)
    assert told or answer.status_code == 400


def test_chats_are_counted_too(server, caplog):
    body = {"messages": CHAT, "max_tokens": 5, "ignore_eos": True}
    _, line = logged(server, caplog, "POST", f"{server.url}/v1/chat/completions", json=body)
    assert "completion=5" in line and "hello" not in line


def test_ids_are_made_and_cleaned(server):
    url = f"{server.url}/health"
    made = {httpx.get(url).headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2 and all(len(one) == 32 for one in made)
    sent = {"X-Request-Id": "a b\tc\xe9" + "x" * 200}
    cleaned = httpx.get(url, headers={k: v.encode("latin-1") for k, v in sent.items()})
    assert cleaned.headers["x-request-id"] == "abc" + "x" * 125


def test_an_engine_that_fails_answers_with_an_id(caplog):
    with serving(ServedTarget(slots=1)) as running:
        running.target.broken = True
        reply = httpx.post(
            f"{running.url}/v1/completions", json=BODY, headers={"X-Request-Id": "i"}
        )
    assert reply.status_code == 500 and reply.headers["x-request-id"] == "i"


def test_paths_cannot_forge_lines_and_probes_are_quiet(server, caplog):
    _, line = logged(server, caplog, "GET", f"{server.url}/x%0a2026 POST /v1")
    assert "\n" not in line and "%0a2026" in line.lower()
    caplog.clear()
    with caplog.at_level(logging.INFO, "specdec.access"):
        httpx.get(f"{server.url}/health")
        logged(server, caplog, "GET", f"{server.url}/version")


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/nowhere"])
def test_head_is_get_without_a_body(server, path):
    with httpx.Client(base_url=server.url) as client:
        head, get = client.head(path), client.get(path)
    assert head.status_code == get.status_code and not head.content
    assert head.headers["content-type"] == get.headers["content-type"]
    assert httpx.head(f"{server.url}/v1/completions").status_code == 405


def raw(server: Server) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    made.settimeout(20)
    return made


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "message",
    [b"", b"GE", HEAD, HEAD + b"Content-Length: 100\r\n\r\n{", b"GET /health HTTP/1.1\r\n"],
)
def test_a_request_that_never_ends_is_dropped(server, monkeypatch, message):
    monkeypatch.setattr("serve.connections.ARRIVAL_SECONDS", 0.3)
    with raw(server) as slow:
        slow.sendall(message)
        assert slow.recv(1000) == b""
    assert server.post("completions", **BODY).status_code == 200


def test_a_trickle_is_dropped_too(server, monkeypatch):
    monkeypatch.setattr("serve.connections.ARRIVAL_SECONDS", 0.5)
    with raw(server) as slow, pytest.raises(OSError):
        slow.sendall(HEAD)
        for _ in range(200):
            slow.sendall(b"X-Slow: 1\r\n")
            time.sleep(0.05)


def test_an_idle_connection_is_closed(monkeypatch):
    monkeypatch.setattr("serve.server.IDLE_SECONDS", 1)
    with serving(ServedTarget(slots=1)) as server, raw(server) as idle:
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while b"ok" not in idle.recv(1000):
            pass
        assert idle.recv(1000) == b""


def test_an_answer_that_nobody_reads_is_dropped(server, monkeypatch):
    monkeypatch.setattr("serve.connections.STALL_SECONDS", 0.5)
    body = json.dumps(BODY | {"max_tokens": 5000, "stream": True, "logprobs": 5}).encode()
    with raw(server) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        deaf.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        deadline = time.monotonic() + 20
        while not server.runner.running:
            assert time.monotonic() < deadline
        while server.web._uvicorn.server_state.tasks:
            assert time.monotonic() < deadline, "the answer is still held"
            time.sleep(0.05)
    server.wait_until_idle()
