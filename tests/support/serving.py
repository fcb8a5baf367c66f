"""A server on a fake target: a real socket, the official openai client, and the oracle."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import openai

from drafters import registry
from drafters.ngram.host import NgramDrafter
from drafters.none.host import NoDrafter
from serve.api import create_app
from serve.lifecycle import Lifecycle
from serve.policy import AccessPolicy
from serve.runner import EngineRunner
from serve.server import ANYBODY, Server as Web
from serve.traces import Around
from specdec.assembly.engine import make_engine
from specdec.assembly.model import load_model
from specdec.audit.identity import identity_of
from specdec.core.config import ModelConfig, PrefixConfig
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.protocols import Drafter
from specdec.core.types import LogprobRows, Sampling, Sequence, Step
from targets.sampling_params import split_seed
from tests.support.fakes import FakeTarget, ScriptedTarget
from tests.support.fakes_text import ALPHABET, EOS, CharTokenizer
from tests.support.templates import tokenizer_with

MODEL = "fake"
TOKENIZER = CharTokenizer()
POISON = ALPHABET.index("Z")


class ServedTarget(FakeTarget):
    """The fake target with log-probabilities that can be calculated, a pace, and two faults."""

    def __init__(self, pause: float = 0.0, **kwargs) -> None:
        super().__init__(vocab=len(ALPHABET), **kwargs)
        self.pause, self.poisoned, self.broken = pause, False, False

    def prefill(self, seq, start, stop):
        if self.poisoned and POISON in seq.tokens[start:stop]:
            raise MemoryError("no room for this one")
        return self._with_logprobs(super().prefill(seq, start, stop), [seq])

    def verify(self, seqs, draft):
        time.sleep(self.pause)
        if self.broken:
            raise RuntimeError("device lost")
        return self._with_logprobs(super().verify(seqs, draft), seqs)

    def _with_logprobs(self, step: Step, seqs) -> Step:
        ids = (step.chosen[..., None] + np.arange(20)) % self.vocab
        values = -(step.chosen[..., None] / 10 + np.arange(20)).astype(np.float32)
        sums = np.stack([step.chosen, step.chosen + 7], -1).astype(np.uint32)
        seeds = np.array([split_seed(seq.sampling.seed) for seq in seqs])
        return Step(step.chosen, None, LogprobRows(values[..., 0], ids, values, sums, seeds))


@dataclass
class Server:
    url: str
    runner: EngineRunner
    target: Any
    openai: openai.OpenAI
    web: Web

    def post(self, path: str, **body) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/{path}", json=body, timeout=60)

    def metrics(self) -> dict[str, float]:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + 5
        while self.runner.running or self.runner.waiting:
            assert time.monotonic() < deadline, "a slot was never freed"
            time.sleep(0.01)


@contextlib.contextmanager
def serving(
    target: ServedTarget,
    drafter: Drafter | None = None,
    k: int = 4,
    max_waiting: int = 64,
    policy: AccessPolicy = ANYBODY,
    **options: Any,
) -> Iterator[Server]:
    drafter = drafter or NgramDrafter()
    engine = Engine(target, drafter, host_cycle(target, drafter, k), max_waiting)
    served_options = {"tokenizer": TOKENIZER, "k": k} | options
    with served(engine, MODEL, policy, **served_options) as server:
        yield server


@contextlib.contextmanager
def serving_mini(
    drafter: str = "ngram",
    k: int = 4,
    slots: int = 4,
    max_len: int = 2048,
    backend: str = "jax",
    reuse: bool = False,
) -> Iterator[Server]:
    """The embedded model, assembled as `specdec serve` does it; by default with the commands' own
    programs, which compile only once for all tests."""
    config = ModelConfig("mini", backend=backend, slots=slots, max_len=max_len)
    asked = registry.config_type()(drafter=drafter, k=k)
    speculation = registry.resolved(asked, config)
    model = load_model(config, speculation)
    engine = make_engine(model, speculation, prefix=PrefixConfig(prefix_cache=reuse))
    options = {"tokenizer": model.tokenizer, "drafter": drafter, "k": k}
    with served(engine, "mini", identity=identity_of(model), **options) as server:
        yield server


SAID = (
    "<|channel>thought\nI must call {it}.\n<channel|>Let me see.\n"
    '<|tool_call>call:edit{path:<|"|>a.py<|"|>,new:<|"|>x = {"a": [1]}\n<|"|>,line:4}<tool_call|>'
    "<|tool_call>call:run{}<tool_call|><|tool_response>"
)
"""A thought, a text and two calls, as Gemma 4 writes them."""


class TurnsTarget(ScriptedTarget):
    """Emits one text, and another one once the prompt contains a tool's result."""

    def __init__(self, script: list[int], then: list[int], answered: int, **kwargs: Any) -> None:
        """answered: the token that begins a tool's result."""
        super().__init__(script, **kwargs)
        self.then, self.answered = then, answered

    def _choose(self, seq: Sequence, length: int) -> int:
        script = self.then if self.answered in seq.tokens[: seq.prompt_len] else self.script
        at = length - seq.prompt_len
        return script[at] if 0 <= at < len(script) else self.end


@contextlib.contextmanager
def scripted(
    text: str,
    drafter: Any = None,
    k: int = 4,
    *,
    then: str | None = None,
    template: str = "mini",
    max_len: int = 2048,
    **options: Any,
) -> Iterator[Server]:
    """A server with a model that always answers `text`, control tokens included, or `then` once the
    prompt contains a tool's result. template: one of `tests.support.templates`."""
    tokenizer = tokenizer_with(template)
    answered = tokenizer.token_id("<|tool_response>")
    assert answered is not None
    target = TurnsTarget(
        tokenizer.encode(text)[1:],
        tokenizer.encode(text if then is None else then)[1:],
        answered,
        end=16,
        slots=2,
        vocab=tokenizer.vocab_size,
        max_len=max_len,
    )
    drafter = drafter or NgramDrafter()
    engine = Engine(target, drafter, host_cycle(target, drafter, k))
    with served(engine, "mini", tokenizer=tokenizer, **options) as server:
        yield server


def events_of(reply: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    """A stream's events: their names, which are their types too, and what they hold."""
    assert reply.status_code == 200 and reply.headers["content-type"].startswith(
        "text/event-stream"
    )
    found = []
    for block in reply.text.strip().split("\n\n"):
        lines = block.split("\n")
        if lines[0].startswith(":"):
            continue  # a comment
        name, data = (line.partition(": ")[2] for line in lines)
        held = json.loads(data)
        assert held["type"] == name
        found.append((name, held))
    return found


@contextlib.contextmanager
def served(
    engine: Engine,
    name: str,
    policy: AccessPolicy = ANYBODY,
    around: Around = lambda app: app,
    **options: Any,
) -> Iterator[Server]:
    runner, lifecycle = EngineRunner(engine), Lifecycle()
    app = create_app(runner, model_name=name, **{"lifecycle": lifecycle} | options)
    listening = socket.create_server(("127.0.0.1", 0))
    with listening as listener, Web(listener, lifecycle, policy, around) as web:
        web.open(app)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        key = options.get("api_keys", ["none"])[0]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)
        with client:
            yield Server(url, runner, engine.target, client, web)
    assert not runner._thread.is_alive()


def plain(prompt: list[int], max_tokens: int, seed: int, stop_ids=(EOS,)) -> list[int]:
    """What plain decoding gives one lone request: the oracle."""
    target = FakeTarget(slots=1, vocab=len(ALPHABET))
    engine = Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 0))
    sampling, stops = Sampling(seed=seed), frozenset(stop_ids)
    seq = Sequence(list(prompt), sampling, max_tokens=max_tokens, stop_ids=stops)
    list(engine.run([seq]))
    return seq.tokens[seq.prompt_len :]


def plain_text(prompt: str, max_tokens: int, seed: int) -> str:
    return TOKENIZER.decode(plain(TOKENIZER.encode(prompt), max_tokens, seed))


LONG = next(seed for seed in range(99) if len(plain_text("abc", 40, seed)) == 40)
"""A seed with which nothing but the limit ends a completion of "abc"."""
CHAT = [{"role": "system", "content": "short"}, {"role": "user", "content": "hello"}]
CHAT_IDS = TOKENIZER.encode_chat(CHAT)
