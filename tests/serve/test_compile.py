"""A served start with a warm cache of compiled programs compiles nothing, and no request does."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest

from drafters.eagle3.files import save_flat
from drafters.eagle3.spec import random_head
from tests.support import cheap
from tests.support.commands import CUDA, PROMPT, refused, wait_until_ready
from tests.support.eagle3_oracle import SPEC
from tests.support.worded import WORDS, write_worded

OPTIONS = ["--slots", "3", "--max-len", "256", "--k", "3"]
KINDS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 3},
    "penalised": {"temperature": 0, "presence_penalty": 1.0},
    "biased": {"temperature": 0, "logit_bias": {"7": 2.0}},
    "told": {"temperature": 1, "logprobs": 3},
}
MISSED = "PERSISTENT COMPILATION CACHE MISS"
FOUND = "Persistent compilation cache hit"


def specdec(*arguments: str, **extra) -> subprocess.Popen[str]:
    """Start a command in its own process, with a log line for each program."""
    log = {"JAX_EXPLAIN_CACHE_MISSES": "1", "JAX_LOG_COMPILES": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "specdec", *arguments],
        env=os.environ | log | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": cheap.FLAGS},
        text=True,
        stdout=subprocess.PIPE,
        **extra,
    )


def compile_ahead(log, *options: str) -> dict:
    with log.open("w") as errors:
        done = specdec("compile", *options, "--json", stderr=errors)
        out, _ = done.communicate(timeout=300)
    assert done.returncode == 0, log.read_text()[-4000:]
    return json.loads(out.splitlines()[-1])["programs"]


def ask_everything(url: str) -> None:
    """Every kind of request, alone and beside others, with prompts of one chunk and of two."""

    def ask(job: tuple[str, dict]) -> int:
        prompt, kind = job
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 9, **kind}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=120).status_code

    jobs = [(text, kind) for kind in KINDS.values() for text in ("x", PROMPT, PROMPT * 12)]
    assert {ask(job) for job in jobs} == {200}
    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(ask, jobs)) == {200}


@pytest.mark.parametrize(
    ("drafter", "loop"),
    [
        ("eagle3", "host"),
        pytest.param("ngram", "host", marks=pytest.mark.slow),
        pytest.param("model", "device", marks=pytest.mark.slow),
    ],
)
def test_a_warm_start_and_its_requests_compile_nothing(tmp_path, worded, drafter, loop):
    options = [
        *OPTIONS,
        "--model",
        str(worded),
        "--drafter",
        drafter,
        "--loop",
        loop,
        "--cache",
        str(tmp_path / "programs"),
    ]
    if drafter == "eagle3":
        head = random_head(replace(SPEC, hidden=48, vocab=WORDS, layers=(0, 1, 2)))
        save_flat(head, tmp_path, (1,))
    if drafter == "model":
        write_worded(tmp_path, groups=1)
    options += [] if drafter == "ngram" else ["--draft-model", str(tmp_path)]
    first = compile_ahead(tmp_path / "compile.log", *options)
    assert first["found"] == 0 and first["compiled"] > 10
    assert MISSED in (tmp_path / "compile.log").read_text()  # so the log has compilations
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log, url = tmp_path / "serve.log", f"http://127.0.0.1:{port}"
    with log.open("w") as errors:
        server = specdec("serve", *options, "--port", str(port), stderr=errors)
        try:
            wait_until_ready(server, url)
            ask_everything(url)
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=60)
    said = log.read_text()
    assert said.count(FOUND) >= first["compiled"]
    missed = [line[:300] for line in said.splitlines() if MISSED in line]
    assert not missed, missed
    assert f"programs: {first['compiled']} from the cache, 0 compiled" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["compile", "--cache", "/proc/x"], ["--cache", "/proc/x"]),
        (["generate", PROMPT, "--cache", "/proc/x"], ["--cache", "/proc/x"]),
        (["compile", *CUDA, "--cache", "/tmp/x"], ["--cache", "--backend jax"]),
        (["compile", "--model", "/nowhere"], ["/nowhere"]),
    ],
)
def test_mistakes_are_one_line(capsys, arguments, words):
    line = refused(capsys, *arguments)
    assert all(word in line for word in words), line
