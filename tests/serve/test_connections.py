"""More connections than the server holds, or than the system has descriptors for."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import time
from contextlib import ExitStack

import httpx
import pytest

from serve.connections import CONNECTIONS, RESERVED_DESCRIPTORS, log_loop_failure, most_connections
from tests.support.serving import ServedTarget, Server, serving

MOST = 3


@pytest.fixture
def crowded(monkeypatch):
    """A server with all connections taken, and these connections."""
    monkeypatch.setattr("serve.connections.CONNECTIONS", MOST)
    monkeypatch.setattr("serve.connections.SPARE_CONNECTIONS", 2)
    with serving(ServedTarget(slots=1)) as server, ExitStack() as stack:
        yield server, [stack.enter_context(connection(server)) for _ in range(MOST)]


def connection(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), 20)


def is_closed(one: socket.socket) -> bool:
    try:
        return one.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_connection_too_many_is_told_so(crowded):
    server, taken = crowded
    answer = server.post("completions", prompt="abc", max_tokens=2)
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
    assert answer.headers["connection"] == "close" and "x-request-id" in answer.headers
    error = answer.json()["error"]
    assert error["code"] == "too_many_connections" and str(MOST) in error["message"]
    answer = server.post("messages", model="fake", messages=[])
    assert answer.json()["error"]["type"] == "overloaded_error"
    for probe in ("health", "ready", "metrics"):
        assert httpx.get(f"{server.url}/{probe}").status_code == 200
    for one in taken:
        one.close()
    deadline = time.monotonic() + 20
    while server.post("completions", prompt="abc", max_tokens=2).status_code == 503:
        assert time.monotonic() < deadline


def test_what_is_beyond_even_that_is_closed_at_once_and_logged_once(crowded, caplog):
    server, _ = crowded
    with ExitStack() as stack:
        more = [stack.enter_context(connection(server)) for _ in range(4)]
        assert all(is_closed(one) for one in more[2:])
    assert caplog.text.count("connections are open") == 1


def test_the_most_follow_from_the_descriptors(monkeypatch):
    for soft, most in [(resource.RLIM_INFINITY, CONNECTIONS), (1 << 20, CONNECTIONS)]:
        monkeypatch.setattr(resource, "getrlimit", {resource.RLIMIT_NOFILE: (soft, soft)}.get)
        assert most_connections() == most
    small = {resource.RLIMIT_NOFILE: (RESERVED_DESCRIPTORS + 7, 0)}
    monkeypatch.setattr(resource, "getrlimit", small.get)
    assert most_connections() == 7


def test_exhausted_descriptors_are_logged_once(caplog):
    async def accept_in_vain() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(log_loop_failure())
        problem = OSError(errno.EMFILE, "Too many open files")
        for _ in range(50):
            loop.call_exception_handler({"message": "accept", "exception": problem})
        loop.call_exception_handler({"message": "another", "exception": ValueError("odd")})

    with caplog.at_level(logging.ERROR):
        asyncio.run(accept_in_vain())
    assert caplog.text.count("ulimit -n") == 1 and "another" in caplog.text


def take_all_descriptors(stack: ExitStack) -> None:
    with pytest.raises(OSError, match="Too many open files"):
        while True:
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))


def test_a_server_without_descriptors_goes_on(monkeypatch, caplog):
    """By the real limit, with the loop that every installation has."""
    monkeypatch.setattr("serve.server.EVENT_LOOP", "asyncio")
    with serving(ServedTarget(slots=1)) as server, ExitStack() as stack:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        clients = [stack.enter_context(socket.socket()) for _ in range(4)]
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        resource.setrlimit(resource.RLIMIT_NOFILE, (clients[-1].fileno() + 50, before[1]))
        with ExitStack() as taken:
            take_all_descriptors(taken)
            for client in clients:
                client.connect(address)
            time.sleep(2.5)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert server.post("completions", prompt="abc", max_tokens=2).status_code == 200
    assert caplog.text.count("ulimit -n") == 1 and "out of system resource" not in caplog.text
