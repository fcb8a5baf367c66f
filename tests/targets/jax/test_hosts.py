"""One model over two processes, as over two hosts: the same text, in a worker and over HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support import cheap
from tests.support.commands import CUDA, PROMPT, free_port, refused, run, wait_until_ready

pytestmark = pytest.mark.usefixtures("cheap_programs")

PROMPTS = ("def add(a, b):", "for i in range(")
SHAPE = ["--slots", "2", "--max-len", "256", "--k", "3"]
LONG = "def add(a, b):\n    return a + b\n" * 12


def python(devices: int, *arguments: str, **extra) -> subprocess.Popen[str]:
    flags = f"--xla_force_host_platform_device_count={devices} {cheap.FLAGS}"
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        text=True,
        stdout=subprocess.PIPE,
        **extra,
    )


def answers(*workers: subprocess.Popen[str]) -> list[dict]:
    with ThreadPoolExecutor() as pool:
        said = list(pool.map(lambda worker: worker.communicate(timeout=300)[0], workers))
    assert [worker.returncode for worker in workers] == [0] * len(workers)
    return [json.loads(out.splitlines()[-1]) for out in said]


@pytest.mark.slow
def test_two_processes_say_what_one_says_in_either_loop(worded):
    port, worker = free_port(), ("tests.targets.jax.hosts_worker", str(worded))
    (alone,) = answers(python(4, *worker))
    assert [len(tokens) for tokens in alone["host"]] == [26, 28]  # a seeded text, a greedy one
    both = dict.fromkeys(("host", "device", "eagle3", "assistant"), alone["host"])
    told = answers(*(python(2, *worker, port, p) for p in "01"))
    first, resumed, cold = told[0].pop("warm")
    assert told[1].pop("warm") == [first, resumed, cold]
    assert (first[0], resumed[0]) == (0, 32) and first[1:] == resumed[1:] == cold[1:]
    assert told == [both, both]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_server_over_two_processes_answers_as_one_device_does(worded, capsys, number):
    """And a signal to the first of them ends both, when what runs has ended."""
    ports, options = (free_port(), free_port()), [*SHAPE, "--model", str(worded)]
    meet = ["--tp", "2", "--coordinator-address", f"localhost:{ports[0]}", "--num-processes", "2"]
    rest = ["--cache", os.environ["JAX_COMPILATION_CACHE_DIR"], "--port", ports[1]]
    servers = [
        python(1, "specdec", "serve", *options, *meet, *rest, "--process-id", p) for p in "01"
    ]
    try:
        url = f"http://127.0.0.1:{ports[1]}"
        wait_until_ready(servers[0], url)
        texts = [ask(url, i) for i in (0, 1)]
        leave(url)
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(lambda i: ask(url, i), (0, 1, 0))) == [*texts, texts[0]]
        twice = [answered(url, LONG) for _ in range(2)]
        assert [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in twice] == [0, 128]
        assert twice[0]["choices"] == twice[1]["choices"]
        assert streamed_past(url, lambda: servers[0].send_signal(number)) == texts[0]
        for server in servers:
            server.communicate(timeout=60)
    finally:
        for server in servers:
            server.kill()
    ended = {signal.SIGTERM: -15, signal.SIGINT: 130}[number]
    assert [server.returncode for server in servers] == [ended, 0]
    for i, text in enumerate(texts):
        asked = ["--temperature", str(0.8 * i), "--seed", str(i), "--max-tokens", "12"]
        out, _ = run(capsys, "generate", PROMPTS[i], *options, *asked, "--json")
        assert json.loads(out.splitlines()[-1])["text"] == text


def ask(url: str, i: int) -> str:
    answer = answered(url, PROMPTS[i], max_tokens=12, seed=i, temperature=0.8 * i)
    return answer["choices"][0]["text"]


def answered(url: str, prompt: str, **overrides) -> dict:
    body = {"model": "tiny", "prompt": prompt, "logprobs": 1, "seed": 0} | overrides
    return httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()


def streamed_past(url: str, event: Callable[[], None]) -> str:
    """The text of request 0 as a stream; `event` is called after its first piece has arrived."""
    body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 12, "seed": 0, "temperature": 0}
    text, done = "", False
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=120
    ) as answer:
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                if not text:
                    event()
                text += json.loads(line[6:])["choices"][0]["text"]
    assert done
    return text


def leave(url: str) -> None:
    """Send a streaming request and disconnect after its first piece: the followers must drop it at
    the same step."""
    body = {"model": "tiny", "prompt": "x", "max_tokens": 50, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        next(answer.iter_lines())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num-processes", "2"], ["--coordinator-address"]),
        (["--coordinator-address", "here", "--num-processes", "2"], ["HOST:PORT or auto", "here"]),
        (["--coordinator-address", "here:1"], ["--num-processes and --process-id"]),
        (["--coordinator-address", "auto", "--process-id", "0"], ["auto", "leave them out"]),
        ([*"--coordinator-address a:1 --num-processes 2 --process-id 2".split()], ["0 to 1"]),
        (
            ["--coordinator-address", "auto", "--auto-with", "eagle3"],
            ["--drafter auto with eagle3", "same programs", "--auto-with none"],
        ),
        ([*CUDA, "--coordinator-address", "auto"], ["--coordinator-address", "--backend jax"]),
    ],
)
def test_mistakes_are_one_line(capsys, arguments, words):
    line = refused(capsys, "generate", PROMPT, *arguments)
    assert all(word in line for word in words), line
