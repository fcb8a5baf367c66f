"""What the server adds to a token's latency: one engine by itself and behind HTTP, by turns.

    PYTHONPATH=. python docs/log/added_latency.py OUT.json                # mini, as tried on a CPU
    PYTHONPATH=. python docs/log/added_latency.py OUT.json --random gemma-4-31b --backend cuda \
        --dtype fp8                                                       # on one H200

By itself: this process calls `engine.step` and nothing else. Behind HTTP: the product's server on
the same engine, as `specdec serve` starts it, and a client in a process of its own that reads
server-sent events. Plain decoding, a token an event. A stream's time per token is the median over
stretches of STRETCH tokens, and a measurement's the median over its streams. `delay` is from the
end of the engine's step that chose a token until the client has its event. OUT.json is written
after each round.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from drafters import registry
from serve.api import create_app
from serve.lifecycle import Lifecycle
from serve.runner import EngineRunner
from serve.server import Server
from specdec.assembly.engine import make_engine, warm_up
from specdec.assembly.model import Model, load_model, random_model
from specdec.core.config import ModelConfig
from specdec.core.engine import Engine
from specdec.core.provenance import gpus, run_record
from specdec.core.types import Event, Sampling, Sequence
from targets.backend import backend_of

STREAMS = (1, 8)
TOKENS = 512
STRETCH = 32
PROMPT = [2 + i % 60 for i in range(32)]
CLIENT = Path(__file__).with_name("added_latency_client.py")
Clock = dict[str, list[float]]
"""Of each answer, when each of its tokens was there."""


class Worded:
    """mini's tokenizer for any id: those of a random model of true size lie beyond its own."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._words = [i for i in range(tokenizer.vocab_size) if tokenizer.decode([i]).isalpha()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def stream(self, skip_special: bool = True) -> Any:
        inner = self._tokenizer.stream(skip_special)
        step = inner.step
        inner.step = lambda token: step(self._words[token % len(self._words)])
        return inner


class Timed:
    """Notes when the engine's steps end that choose tokens, as long as it is in use."""

    def __init__(self, engine: Engine) -> None:
        self.clock: Clock = defaultdict(list)
        self._engine = engine

    def __enter__(self) -> Timed:
        step = self._engine.step

        def timed() -> list[Event]:
            events = step()
            now = time.perf_counter()
            for event in events:
                self.clock[event.sequence.request_id] += [now] * len(event.tokens)
            return events

        self._engine.step = timed
        return self

    def __exit__(self, *_: object) -> None:
        del self._engine.step


def alone(engine: Engine, streams: int) -> float:
    """Milliseconds per token, without a server."""
    seqs = [Sequence(list(PROMPT), max_tokens=TOKENS, request_id=str(i)) for i in range(streams)]
    with Timed(engine) as timed:
        engine.run_to_end(seqs)
    return 1e3 * per_token(timed.clock)


def behind_http(engine: Engine, port: int, streams: int) -> tuple[float, float]:
    """Milliseconds per token as a client reads them, and of a token's delay."""
    ask = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    body = json.dumps({**ask, "stream": True, "ignore_eos": True})
    with Timed(engine) as timed:
        command = [sys.executable, str(CLIENT), str(port), str(streams), body]
        told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    read: Clock = {answer["id"]: answer["times"] for answer in json.loads(told)}
    chosen = {name.rpartition("-")[0]: times for name, times in timed.clock.items()}
    delays = [
        came - there
        for name, times in read.items()
        for came, there in zip(times, chosen[name], strict=False)
    ]
    return 1e3 * per_token(read), 1e3 * median(delays)


def per_token(clock: Clock) -> float:
    """Seconds."""
    stretches = [
        median((b - a) / STRETCH for a, b in pairwise(times[:TOKENS:STRETCH]))
        for times in clock.values()
    ]
    assert all(len(times) >= TOKENS for times in clock.values()), "a token was no event"
    return median(stretches)


@contextmanager
def server_of(engine: Engine, model: Model) -> Iterator[int]:
    """The port where it answers."""
    lifecycle = Lifecycle()
    app = create_app(EngineRunner(engine), Worded(model.tokenizer), model.name, lifecycle=lifecycle)
    listening = socket.create_server(("127.0.0.1", 0))
    with listening as listener, Server(listener, lifecycle) as server:
        server.open(app)
        yield listener.getsockname()[1]


def one_round(engine: Engine, model: Model, server_first: bool) -> list[dict[str, float]]:
    found: dict[int, dict[str, float]] = {streams: {"streams": streams} for streams in STREAMS}

    def by_itself() -> None:
        for streams in STREAMS:
            found[streams]["engine_ms"] = alone(engine, streams)

    def served() -> None:
        with server_of(engine, model) as port:
            for streams in STREAMS:
                http, delay = behind_http(engine, port, streams)
                found[streams] |= {"http_ms": http, "delay_ms": delay}

    for measure in (served, by_itself) if server_first else (by_itself, served):
        measure()
    return [row | {"added": row["http_ms"] / row["engine_ms"] - 1} for row in found.values()]


def summary(rounds: list[list[dict[str, float]]]) -> Iterator[dict[str, Any]]:
    """Medians over the rounds, and the least and largest share that was added."""
    for rows in zip(*rounds, strict=True):
        middle = {name: round(median(row[name] for row in rows), 4) for name in rows[0]}
        middle["streams"] = int(middle["streams"])
        added = [round(row["added"], 4) for row in rows]
        yield middle | {"added_least": min(added), "added_most": max(added)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--random", help="a public model's size; by default mini")
    parser.add_argument("--backend", default="jax")
    parser.add_argument("--dtype")
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    config = ModelConfig(
        backend=given.backend, dtype=given.dtype, slots=max(STREAMS), max_len=TOKENS + 128
    )
    plain = registry.resolved(registry.config_type()(drafter="none"), config)
    made = random_model(given.random, config, plain) if given.random else load_model(config, plain)
    engine = make_engine(made, plain)
    warm_up(engine, [Sampling()], max(STREAMS), [len(PROMPT)])
    record = run_record(backend_of(config).device(config), gpus=gpus())
    rounds: list[list[dict[str, float]]] = []
    for number in range(given.rounds):
        rounds.append(one_round(engine, made, server_first=number % 2 == 1))
        for row in rounds[-1]:
            print(number, {name: round(value, 4) for name, value in row.items()}, flush=True)
        rows = list(summary(rounds))
        about: dict[str, Any] = {"model": given.random or "mini", "tokens": TOKENS, "rows": rows}
        about |= {"rounds": rounds, "run": record}
        given.out.write_text(json.dumps(about, indent=1) + "\n")
    print(f"{'streams':>8}{'engine ms':>12}{'HTTP ms':>10}{'added':>9}{'least':>9}{'most':>8}")
    for row in summary(rounds):
        print(
            f"{row['streams']:8}{row['engine_ms']:12.3f}{row['http_ms']:10.3f}{row['added']:9.2%}"
            f"{row['added_least']:9.2%}{row['added_most']:8.2%}   delay {row['delay_ms']:.3f} ms"
        )


if __name__ == "__main__":
    main()
