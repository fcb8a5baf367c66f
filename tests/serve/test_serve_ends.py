"""A server with a failed engine reports the error and ends; one with an unreadable stderr goes
on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from specdec.cli.stderr import TEXTS, PatientText
from tests.support import cheap
from tests.support.commands import free_port, wait_until_ready

FAILING = """
from specdec.cli import main
from specdec.core.engine import Engine

decode = Engine._decode

def failing(self, rows):
    if any(seq.max_tokens == 77 and seq.emitted > 2 for seq in rows):
        raise RuntimeError("device lost")
    return decode(self, rows)

Engine._decode = failing
main()
"""
"""The command line with an engine that fails in the middle of a request for 77 tokens."""
BODY = {"prompt": "def f(", "max_tokens": 77, "ignore_eos": True}


@contextmanager
def command(model, *start: str, **popen: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`specdec serve`, started by these arguments of Python."""
    port = free_port()
    options = ["--model", str(model), "--port", port, "--slots", "2", "--max-len", "128"]
    options += ["--cache", os.environ["JAX_COMPILATION_CACHE_DIR"], "--drafter", "none"]
    flags = {"XLA_FLAGS": cheap.FLAGS, "JAX_PLATFORMS": "cpu"}
    server = subprocess.Popen(
        [sys.executable, *start, "serve", *options], env=os.environ | flags, text=True, **popen
    )
    try:
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def test_an_engine_that_fails_ends_the_process_once_all_are_told(worded):
    with command(worded, "-c", FAILING, stderr=subprocess.PIPE) as (server, url):
        wait_until_ready(server, url)
        with httpx.stream(
            "POST", f"{url}/v1/completions", json={**BODY, "stream": True}, timeout=60
        ) as answer:
            *_, error, done = [line for line in answer.iter_lines() if line]
        assert "device lost" in json.loads(error.removeprefix("data: "))["error"]["message"]
        assert done == "data: [DONE]"
        _, said = server.communicate(timeout=60)
    assert server.returncode == 1
    assert "the engine has failed" in said.splitlines()[-1]


def full_pipe(stack: ExitStack) -> tuple[int, int]:
    """Its ends; it is not read."""
    read, write = os.pipe()
    stack.callback(os.close, read)
    stack.callback(os.close, write)
    os.set_blocking(write, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(write, b"x" * 4096)
    os.set_blocking(write, True)
    return read, write


def full_disk(stack: ExitStack) -> tuple[int, int]:
    file = os.open("/dev/full", os.O_WRONLY)
    stack.callback(os.close, file)
    return file, file


def deaf_pipe(stack: ExitStack) -> tuple[int, int]:
    """A pipe without a reader."""
    read, write = os.pipe()
    os.close(read)
    stack.callback(os.close, write)
    return write, write


CLOSED = "import os, sys; os.close(2); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
"""Starts Python anew, without stderr."""


@pytest.mark.parametrize("made", [full_pipe, full_disk, deaf_pipe, None])
def test_a_server_that_nobody_listens_to_serves(worded, made):
    start = ["-m", "specdec"]
    with ExitStack() as stack:
        where = {} if made is None else {"stderr": made(stack)[1]}
        start = ["-c", CLOSED, *start] if made is None else start
        server, url = stack.enter_context(command(worded, *start, **where))
        wait_until_ready(server, url)
        for _ in range(3):
            answer = httpx.post(f"{url}/v1/completions", json=BODY | {"max_tokens": 5}, timeout=60)
            assert answer.status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == -signal.SIGTERM


def test_what_a_full_pipe_had_no_room_for_is_counted():
    with ExitStack() as stack:
        read, write = full_pipe(stack)
        text = PatientText(os.fdopen(os.dup(write), "w"))
        for number in range(TEXTS + 5):
            text.write(f"line {number}\n")
        text.drain(0.01)
        said = b""
        while b"dropped" not in said:
            said = os.read(read, 1 << 20).lstrip(b"x")
    assert b"pieces of this log were dropped: stderr was full" in said
