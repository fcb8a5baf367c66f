"""What a plain request waits for beside attacks, as a multiple of its latency on an idle server.

python -m tests.adversaries --max-len 65536 [options of serve]    # starts a server on mini
python -m tests.adversaries --url http://127.0.0.1:8000 --pid 1234
python -m tests.adversaries --sees    # hostile pictures, to a checkpoint that takes some
python -m tests.adversaries --gaps    # a stream's gaps beside an ambiguous grammar
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import multiprocessing
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence as Seqs
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from multiprocessing.synchronize import Event
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
from PIL import Image

from targets import mini
from tests.hostile_pictures import hostile, seeds
from tests.support.commands import free_port, wait_until_ready
from tests.support.constrained import AMBIGUOUS
from tools import seeing_mini

PLAIN = {"prompt": "def add(first, second):", "max_tokens": 4, "ignore_eos": True}
STREAMED = 100
"""Tokens of a stream of which the gaps are measured."""
BESIDE = 52
"""Tokens of the requests beside it: as many as the ambiguous grammar lets through."""
SCHEMAS_AT_ONCE = 10
SCHEMA_BYTES = 780
FACTORS = 6
"""Large numbers that a value must be a multiple of: to compile them takes longer than a trial may.
"""
BODIES_AT_ONCE = 2
BODY_BYTES = 6_000_000
PROPERTIES = 120_000
LEAVERS_AT_ONCE = 4
PATIENCE_SECONDS = 0.3
"""A leaver's."""
TIMEOUT_SECONDS = 300.0
HEAD_START_SECONDS = 1.0
"""Of an attack, before the first plain request."""
REST_SECONDS = 60.0
"""After which memory is read again."""
SAMPLE_SECONDS = 0.1
PAUSE_SECONDS = 0.1
"""Between plain requests, and of an attacker that was refused at once."""
MB = 1e6

Attack = Callable[[httpx.Client, int], httpx.Response]


def bad_schema(client: httpx.Client, max_len: int) -> httpx.Response:
    """A request with a schema that takes longer to compile than a trial may; a new one each time,
    so that its verdict is never cached."""
    factors = [{"multipleOf": 10**6 + secrets.randbelow(10**6) * 2 + 1} for _ in range(FACTORS)]
    schema: dict[str, Any] = {"type": "integer", "allOf": factors, "description": ""}
    schema["description"] = "x" * max(0, SCHEMA_BYTES - len(json.dumps(schema)))
    named = {"name": "it", "schema": schema, "strict": True}
    body = {
        "messages": [{"role": "user", "content": "a number"}],
        "response_format": {"type": "json_schema", "json_schema": named},
        "max_tokens": 4,
    }
    return client.post("/v1/chat/completions", json=body)


def huge_body(client: httpx.Client, max_len: int) -> httpx.Response:
    """A tool of more properties than any prompt has room for."""
    return client.post(
        "/v1/chat/completions", content=_huge(), headers={"Content-Type": "application/json"}
    )


def _huge() -> bytes:
    each = BODY_BYTES // PROPERTIES - len('"p000000":{"type":"string"},')
    names = (f"p{number:06}{'x' * each}" for number in range(PROPERTIES))
    properties = {name: {"type": "string"} for name in names}
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "tools": [{"type": "function", "function": function}],
        "max_tokens": 4,
    }
    return json.dumps(body, separators=(",", ":")).encode()


def leaver(client: httpx.Client, max_len: int) -> httpx.Response:
    """It leaves while its prompt, a fresh one that nearly fills the context, is read."""
    words = f"{secrets.token_hex(8)} " + "x = [1, 2] " * (max_len // 16)
    return client.post(
        "/v1/completions", json={"prompt": words, "max_tokens": 4}, timeout=PATIENCE_SECONDS
    )


ATTACKS: dict[str, tuple[Attack, int]] = {
    "bad schemas": (bad_schema, SCHEMAS_AT_ONCE),
    "huge bodies": (huge_body, BODIES_AT_ONCE),
    "leavers": (leaver, LEAVERS_AT_ONCE),
}


def hostile_picture(client: httpx.Client, max_len: int) -> httpx.Response:
    """Mostly a file that is cut or changed; at times a whole one of 50 megapixels."""
    if secrets.randbelow(8) == 0:
        data = _large_picture()
    else:
        data = hostile(np.random.default_rng(secrets.randbits(32)), seeds())
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    content = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "What is it?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
    return client.post("/v1/chat/completions", json=body)


@cache
def _large_picture() -> bytes:
    written = io.BytesIO()
    Image.new("RGB", (10_000, 5_000), "teal").save(written, "PNG")
    return written.getvalue()


PICTURES: dict[str, tuple[Attack, int]] = {"hostile pictures": (hostile_picture, 4)}


def repeat(attack: Attack, url: str, max_len: int, ended: Event, reports: Any) -> None:
    """An attacker's process: send, whatever is answered, until `ended`."""
    statuses: Counter[str] = Counter()
    with httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS) as client:
        while not ended.is_set():
            try:
                status = str(attack(client, max_len).status_code)
            except httpx.TransportError as problem:
                status = type(problem).__name__
            statuses[status] += 1
            if status in ("429", "503"):
                time.sleep(PAUSE_SECONDS)
    reports.put(dict(statuses))


@contextmanager
def attacked(url: str, max_len: int, attack: Attack, count: int) -> Iterator[Counter[str]]:
    """Attackers beside the block; afterwards the counter holds what they were answered."""
    context = multiprocessing.get_context("fork")
    ended, reports, statuses = context.Event(), context.Queue(), Counter[str]()
    inputs = (attack, url, max_len, ended, reports)
    attackers = [context.Process(target=repeat, args=inputs, daemon=True) for _ in range(count)]
    for one in attackers:
        one.start()
    time.sleep(HEAD_START_SECONDS)
    yield statuses
    ended.set()
    for _ in attackers:  # all are read before any is joined: a full queue would hold one up
        statuses.update(reports.get(timeout=TIMEOUT_SECONDS))
    for one in attackers:
        one.join(TIMEOUT_SECONDS)


def latencies(url: str, tries: int) -> list[float]:
    """Of plain requests one after another, each on a connection of its own."""
    took = []
    for _ in range(tries):
        began = time.monotonic()
        answer = httpx.post(f"{url}/v1/completions", json=PLAIN, timeout=TIMEOUT_SECONDS)
        took.append(time.monotonic() - began)
        assert answer.status_code == 200, answer.text
        time.sleep(PAUSE_SECONDS)
    return took


def plain_beside(client: httpx.Client, max_len: int) -> httpx.Response:
    body = {"prompt": "a", "max_tokens": BESIDE, "ignore_eos": True}
    return client.post("/v1/completions", json=body)


def ambiguous(client: httpx.Client, max_len: int) -> httpx.Response:
    body: dict[str, Any] = {"prompt": "a", "max_tokens": BESIDE, "min_tokens": BESIDE}
    body["structured_outputs"] = {"grammar": AMBIGUOUS}
    return client.post("/v1/completions", json=body)


def gaps(url: str, tries: int) -> dict[str, float]:
    """The 99th percentile of a stream's gaps, ms, beside one caller of each kind, in turns; and the
    quotient."""
    found: dict[str, list[float]] = {"plain": [], "ambiguous": []}
    for _ in range(tries):
        for name, beside in (("plain", plain_beside), ("ambiguous", ambiguous)):
            with attacked(url, 0, beside, 1):
                found[name] += _gaps_of_one(url)
    worst = {name: float(np.percentile(own, 99)) for name, own in found.items()}
    return worst | {"quotient": round(worst["ambiguous"] / worst["plain"], 2)}


def _gaps_of_one(url: str) -> list[float]:
    body = {"prompt": "def add(", "max_tokens": STREAMED, "ignore_eos": True, "stream": True}
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT_SECONDS
    ) as answer:
        times = [time.monotonic() for line in answer.iter_lines() if line.startswith("data: {")]
    return [1000 * (after - before) for before, after in pairwise(times)]


@dataclass
class Memory:
    """What a process and its children hold (RSS), sampled by a thread."""

    pid: int
    peak: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)

    def now(self) -> int:
        """Bytes."""
        return sum(map(_resident, _family(self.pid)))

    @contextmanager
    def watched(self) -> Iterator[None]:
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        yield
        self._ended.set()
        thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, self.now())


def _resident(pid: int) -> int:
    with suppress(OSError):  # it may have ended by now
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(entry.parent.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


def long_mini(folder: Path, max_len: int) -> Path:
    """A copy of mini with the context length `max_len` in its config; its texts don't matter
    here."""
    model = Path(shutil.copytree(mini.path("mini"), folder / "mini"))
    file = model / "config.json"
    config = json.loads(file.read_text())
    config.get("text_config", config)["max_position_embeddings"] = max_len
    file.write_text(json.dumps(config))
    return model


@contextmanager
def started(max_len: int, more: Seqs[str], sees: bool = False) -> Iterator[tuple[str, int]]:
    """A server on mini: its address and process. more: options of `specdec serve`. sees: with a
    random image side."""
    port = free_port()
    with TemporaryDirectory() as folder:
        model = long_mini(Path(folder), max_len)
        if sees:
            model = seeing_mini.write(Path(folder) / "seeing", model)
        options = ["--model", str(model), "--port", port, "--max-len", str(max_len), *more]
        with process("serve", *options, "--log-level", "warning") as server:
            wait_until_ready(server, url := f"http://127.0.0.1:{port}")
            yield url, server.pid


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """specdec with these arguments, ended after the block."""
    server = subprocess.Popen([sys.executable, "-m", "specdec", *arguments])
    try:
        yield server
    finally:
        server.terminate()
        server.wait(60)


def report(
    url: str,
    pid: int | None,
    max_len: int,
    tries: int,
    attacks: dict[str, tuple[Attack, int]] = ATTACKS,
) -> dict[str, Any]:
    """Idle first, then beside each attack, then beside all."""
    latencies(url, 3)  # whatever the first ones load
    idle = statistics.median(latencies(url, tries))
    memory = None if pid is None else Memory(pid)
    before = peak = memory.now() if memory else 0
    found: dict[str, Any] = {"max_len": max_len, "tries": tries, "idle_ms": round(1000 * idle, 1)}
    with memory.watched() if memory else nullcontext():
        for name, (attack, count) in attacks.items():
            with attacked(url, max_len, attack, count) as statuses:
                took = latencies(url, tries)
            found[name] = _ratios(took, idle) | {"answers": dict(statuses)}
            if memory:
                found[name]["most_mb"] = round((memory.peak - before) / MB)
                found[name]["held_mb"] = round((memory.now() - before) / MB)
                peak, memory.peak = max(peak, memory.peak), 0
            print(json.dumps({name: found[name]}), file=sys.stderr, flush=True)
    if memory:
        time.sleep(REST_SECONDS)
        held = {"idle": before, "peak": peak, "a minute later": memory.now()}
        found["memory_mb"] = {name: round(size / MB) for name, size in held.items()}
    return found


def _ratios(took: list[float], idle: float) -> dict[str, float]:
    """Median and worst, divided by the idle median."""
    return {
        "median": round(statistics.median(took) / idle, 1),
        "worst": round(max(took) / idle, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", help="of a server that runs; one is started without it")
    parser.add_argument("--pid", type=int, help="its process, for memory")
    parser.add_argument("--max-len", type=int, default=2048, help="the server's")
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--sees", action="store_true", help="hostile pictures in place of others")
    parser.add_argument("--gaps", action="store_true", help="a stream's gaps alone")
    options, more = parser.parse_known_args()
    attacks = PICTURES if options.sees else ATTACKS
    if options.url is not None:
        found = report(options.url, options.pid, options.max_len, options.tries, attacks)
        print(json.dumps(found))
        return
    with started(options.max_len, more, options.sees) as (url, pid):
        if options.gaps:
            print(json.dumps(gaps(url, options.tries)))
            return
        print(json.dumps(report(url, pid, options.max_len, options.tries, attacks)))


if __name__ == "__main__":
    main()
