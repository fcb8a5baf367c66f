"""An agent's day at length on one card: a conversation of many turns that grows to 100,000 tokens,
each turn's prompt the one before, its answer and a tool's result; three short users decode beside
it.

    PYTHONPATH=. python docs/log/agent_day.py gemma-4-31b --out day.json

Random weights of true size. For each turn: tokens of the prompt, how many were reused, the first
token's time, the longest gap of the others while the prompt is read, and memory. The last prompt is
read once more with nothing kept, for comparison. Needs a Hopper card.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from drafters import registry
from specdec.assembly.engine import serving_engine
from specdec.assembly.model import random_model
from specdec.core.config import ModelConfig, PrefixConfig
from specdec.core.engine import Engine
from specdec.core.types import Sampling, Sequence

FIRST = 9_000
"""Tokens of an agent's own instructions and tools."""
ANSWER = 60
"""Tokens of each answer: a tool call."""
OTHERS = 3
"""Short users beside it."""
QUOTED = 0.5
"""Share of a tool's result that repeats earlier text, as files that are read again do."""
GIB = 1 << 30


@dataclass(frozen=True)
class Turn:
    """ms; gaps are the longest of any other user. gib: in use on the card."""

    prompt: int
    reused: int
    first_token: float
    gap_reading: float
    gap_decoding: float
    token: float
    gib: float


class Beside:
    """Short users of whom each asks again when it has its answer, and how long they wait."""

    def __init__(self, engine: Engine, vocab: int) -> None:
        self._engine, self._random = engine, np.random.default_rng(1)
        self._vocab, self._seen = vocab, {}
        self.longest = 0.0
        for _ in range(OTHERS):
            self._ask()

    def _ask(self) -> None:
        text = self._random.integers(3, self._vocab, 300).tolist()
        seq = Sequence(text, Sampling(temperature=1.0, seed=7), max_tokens=400)
        self._engine.submit(seq)

    def saw(self, events: list[Any], now: float) -> None:
        """A gap lies between two tokens of one answer."""
        for event in events:
            key = id(event.sequence)
            before = self._seen.pop(key, None)
            if before is not None:
                self.longest = max(self.longest, now - before)
            if event.finish is None:
                self._seen[key] = now
            else:
                self._ask()

    def taken(self) -> float:
        longest, self.longest = self.longest, 0.0
        return 1e3 * longest


def turn_of(engine: Engine, text: list[int], beside: Beside) -> tuple[Turn, list[int]]:
    seq, times, gap = Sequence(list(text), max_tokens=ANSWER), [], 0.0
    engine.submit(seq)
    began = time.perf_counter()
    beside.taken()
    while len(seq.tokens) < len(text) + ANSWER:
        events = engine.step()
        now = time.perf_counter()
        own = [event for event in events if event.sequence is seq]
        beside.saw([event for event in events if event.sequence is not seq], now)
        if own:
            if not times:
                gap = beside.taken()  # its prompt has just been read
            times.append(now)
    spent = (times[-1] - times[0]) / max(1, len(seq.tokens) - len(text) - 1)
    free, whole = torch.cuda.mem_get_info()
    used = (whole - free) / GIB
    after = beside.taken()
    first = 1e3 * (times[0] - began)
    return Turn(len(text), seq.cached, first, gap, after, 1e3 * spent, used), seq.tokens


def result_of(random: np.random.Generator, text: list[int], size: int, vocab: int) -> list[int]:
    """A tool's result: new text, and a piece that was there before."""
    quoted = int(size * QUOTED)
    start = int(random.integers(0, len(text) - quoted))
    return random.integers(3, vocab, size - quoted).tolist() + text[start : start + quoted]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--dtype", default="fp8")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--longest", type=int, default=100_000)
    parser.add_argument("--auto-with", default="none")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    own = {"dtype": asked.dtype, "kv_dtype": "fp8", "max_len": 131_072}
    config = ModelConfig(asked.name, backend="cuda", slots=OTHERS + 1, **own)
    options = registry.config_type()(drafter="auto", k=7, auto_with=asked.auto_with)
    speculation = registry.resolved(options, ModelConfig("x"), random=True)
    model = random_model(asked.name, config, speculation)
    engine = serving_engine(model, speculation, 256, PrefixConfig())
    vocab, random = model.target.vocab, np.random.default_rng(0)
    print(f"{torch.cuda.get_device_name()}, {asked}", flush=True)
    beside, turns = Beside(engine, vocab), []
    text = random.integers(3, vocab, FIRST).tolist()
    size = (asked.longest - FIRST) // (asked.turns - 1) - ANSWER
    for number in range(asked.turns):
        turn, text = turn_of(engine, text, beside)
        turns.append(turn)
        print(number + 1, {k: round(v, 1) for k, v in asdict(turn).items()}, flush=True)
        text = text + result_of(random, text, size, vocab)
    cold = Sequence(text[: turns[-1].prompt], max_tokens=1)
    cold.reuse = None
    began = time.perf_counter()
    engine.submit(cold)
    while len(cold.tokens) == turns[-1].prompt:
        beside.saw([e for e in engine.step() if e.sequence is not cold], time.perf_counter())
    alone = 1e3 * (time.perf_counter() - began)
    gaps = [turn.gap_reading for turn in turns[1:]]
    print(
        f"first token: median {median(t.first_token for t in turns[1:]):.0f} ms, the last "
        f"{turns[-1].first_token:.0f}, the same with nothing kept {alone:.0f}; others' longest gap "
        f"while a prompt is read: median {median(gaps):.0f}, worst {max(gaps):.0f}"
    )
    record = {"card": torch.cuda.get_device_name(), "argv": vars(asked) | {"out": None}}
    record |= {"turns": [asdict(turn) for turn in turns], "cold_ms": alone}
    asked.out.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
