"""A server answers while it loads: its stage on /health and /ready, 503 on all other routes."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
from llguidance import LLTokenizer

from drafters.none.host import NoDrafter
from serve.api import create_app
from serve.lifecycle import Lifecycle
from serve.runner import EngineRunner
from serve.server import Server as Web
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from targets.jax import compile_cache
from tests.support.commands import refused, wait_until_ready
from tests.support.constrained import mini_tokenizer
from tests.support.fakes import ScriptedTarget
from tests.support.fakes_text import CharTokenizer
from tests.support.serving import ServedTarget, serving
from tools.random_server import with_words

ROUTES = ["v1/completions", "v1/chat/completions", "tokenize", "v1/models", "metrics", "nowhere"]


@contextmanager
def shown(doing: str):
    yield


def test_while_loading_every_route_says_so():
    lifecycle = Lifecycle()
    with socket.create_server(("127.0.0.1", 0)) as listener, Web(listener, lifecycle) as web:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with lifecycle.telling(shown)("loading mini"):
            for route in ("health", "ready"):
                answer = httpx.get(f"{url}/{route}")
                assert answer.status_code == 503
                assert answer.json() == {"status": "loading", "doing": "loading mini"}
            for method in ("GET", "POST"):
                for route in ROUTES:
                    answer = httpx.request(method, f"{url}/{route}")
                    assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
                    assert "loading mini" in answer.json()["error"]["message"]
                    assert answer.json()["error"]["code"] == "loading"
        target = ServedTarget(slots=1)
        engine = Engine(target, drafter := NoDrafter(), host_cycle(target, drafter, 0))
        web.open(create_app(EngineRunner(engine), CharTokenizer(), "fake", lifecycle=lifecycle))
        assert httpx.get(f"{url}/ready").json() == {"status": "ready"}
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        body = {"prompt": "abc", "max_tokens": 2}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200


def test_not_ready_where_the_engine_has_failed():
    with serving(ServedTarget(slots=1)) as server:
        server.target.broken = True
        # a first token that ends the text, which some seeds have, would need no more of the target
        answer = server.post("completions", prompt="abc", ignore_eos=True)
        assert answer.status_code == 500
        answer = httpx.get(f"{server.url}/ready")
        assert answer.status_code == 503 and answer.json()["status"] == "failed"
        assert "device lost" in answer.json()["doing"]
        assert server.post("completions", prompt="abc").json()["error"]["code"] == "engine_stopped"


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
WORDS = 262_144
"""Tokens of Gemma 4."""


def test_not_ready_before_grammars_can_be_used(monkeypatch):
    """The first request with a schema would hold up all others while a vocabulary is read."""
    tokenizer = with_words(mini_tokenizer(), WORDS)
    read, go_on = threading.Semaphore(0), threading.Event()
    readings = []

    def reading(*args, **kwargs):
        readings.append(threading.current_thread().name)
        read.release()
        assert go_on.wait(60)
        return LLTokenizer(*args, **kwargs)

    monkeypatch.setattr("specdec.constraints.vocabulary.LLTokenizer", reading)
    target = ScriptedTarget(tokenizer.encode('{"a":1}')[1:], end=16, slots=1, vocab=WORDS)
    engine = Engine(target, drafter := NoDrafter(), host_cycle(target, drafter, 0))
    lifecycle = Lifecycle()
    app = create_app(EngineRunner(engine), tokenizer, "fake", lifecycle=lifecycle)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        Web(listener, lifecycle) as web,
        ThreadPoolExecutor() as pool,
    ):
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        opened = pool.submit(web.open, app)
        assert read.acquire(timeout=60)
        answer = httpx.get(f"{url}/ready")
        assert answer.status_code == 503
        assert answer.json() == {"status": "loading", "doing": "reading the vocabulary"}
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "abc"}).status_code == 503
        go_on.set()
        opened.result(60)
        assert httpx.get(f"{url}/ready").json() == {"status": "ready"}
        body = {"messages": [{"role": "user", "content": "x"}], "response_format": FORMAT}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert answer.json()["choices"][0]["message"]["content"] == '{"a":1}'
    assert len(readings) == 1 and readings[0] != "specdec-web"


def test_a_tokenizer_that_grammars_cannot_use_still_serves(caplog):
    with serving(ServedTarget(slots=1)) as server:
        assert server.post("completions", prompt="abc", max_tokens=2).status_code == 200
    assert "no grammar can be used" in caplog.text


def test_a_failure_to_load_is_one_line(capsys):
    line = refused(capsys, "serve", "--port", "0", "--model", "/nowhere")
    assert "/nowhere" in line


def test_the_process_answers_from_the_start(worded):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--model", str(worded), "--port", str(port), "--slots", "1", "--max-len", "64"]
    programs = os.environ["JAX_COMPILATION_CACHE_DIR"]
    server = subprocess.Popen(
        [sys.executable, "-m", "specdec", "serve", *options, "--cache", programs], text=True
    )
    try:
        url, said = f"http://127.0.0.1:{port}", set()
        while (answer := health(url)) is None or answer.status_code == 503:
            assert server.poll() is None
            if answer is not None:
                assert answer.json()["status"] == "loading"
                said.add(answer.json()["doing"])
            time.sleep(0.02)
        assert said & {"loading tiny", "compiling"}, said
        wait_until_ready(server, url)
        assert httpx.get(f"{url}/ready").status_code == 200
    finally:
        server.kill()
        server.wait()


def health(url: str) -> httpx.Response | None:
    """None before it listens; from then on it answers."""
    try:
        return httpx.get(f"{url}/health", timeout=20)
    except httpx.ConnectError:
        return None


def test_a_read_only_home_is_a_warning(monkeypatch, caplog, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(compile_cache, "PROGRAMS", tmp_path / "file" / "xla")
    with caplog.at_level(logging.WARNING):
        compile_cache.keep_programs_if_possible()
    assert "--cache" in caplog.text and "not kept" in caplog.text
