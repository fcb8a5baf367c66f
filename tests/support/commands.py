"""Running commands as a user types them, and being refused."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdec.cli import main
from tests.support.places import ROOT

PROMPT = "def add(first, second):\n    return"
CUDA = ["--backend", "cuda", "--device", "cpu"]
"""The CUDA target on its references, which need no GPU."""
HOLDS = """import sys, time
from pathlib import Path
from specdec.core.alone import hold_alone
hold_alone(Path(sys.argv[1]), "--run")
print("held", flush=True)
time.sleep(600)
"""


def run(capsys, *arguments) -> tuple[str, str]:
    main(list(arguments))
    captured = capsys.readouterr()
    return captured.out, captured.err


def refused(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    captured = capsys.readouterr()
    assert stop.value.code == 2 and not captured.out
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("specdec: "), captured.err
    return lines[0]


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def wait_until_ready(server: subprocess.Popen[Any], url: str) -> None:
    for _ in range(1200):
        assert server.poll() is None, "the server ended"
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.25)
    raise AssertionError("the server never came up")


@contextmanager
def held(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A folder in which another process works."""
    command = [sys.executable, "-c", HOLDS, str(folder)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        try:
            yield other
        finally:
            other.kill()
