"""Seats of one card where slots are longer than their texts: pages, instead of room for the longest
text in every slot.

    PYTHONPATH=. python docs/log/pages.py gemma-4-31b --free 78

Random weights of true size. --free leaves so many GiB of the card, as a smaller one has. As many
texts as fit are read and decoded at once; some of them are decoded alone and compared; and one user
alone is timed, beside a target with whole slots. Needs a Hopper card.
"""

from __future__ import annotations

import argparse
import gc
import time
from statistics import median
from typing import Any

import numpy as np
import torch

from drafters import registry
from specdec.assembly.engine import make_engine
from specdec.assembly.model import Model, random_model
from specdec.core.config import ModelConfig
from specdec.core.engine import Engine
from specdec.core.types import Sampling, Sequence

ALONE = 3
"""Texts that are decoded alone too."""
TOKENS = 120
"""Emitted for each text."""
STEPS = 200
"""Cycles that are timed with one user."""
GIB = 1 << 30


def speculation() -> Any:
    own = registry.config_type()(drafter="none", k=0)
    return registry.resolved(own, ModelConfig("x"), random=True)


def loaded(asked: argparse.Namespace, slots: int, max_len: int) -> Model:
    own = {"dtype": asked.dtype, "kv_dtype": "fp8", "max_len": max_len}
    config = ModelConfig(asked.name, backend="cuda", slots=slots, tp=asked.tp, **own)
    return random_model(asked.name, config, speculation())


def texts(asked: argparse.Namespace, vocab: int) -> list[Sequence]:
    random = np.random.default_rng(1)
    return [
        Sequence(
            random.integers(0, vocab, asked.tokens).tolist(),
            Sampling(temperature=1.0, seed=i),
            max_tokens=TOKENS,
        )
        for i in range(asked.slots)
    ]


def all_at_once(asked: argparse.Namespace, engine: Engine) -> list[Sequence]:
    seqs, seats, steps = texts(asked, engine.target.vocab), 0, []
    for seq in seqs:
        engine.submit(seq)
    began = time.perf_counter()
    while not engine.idle:
        started = time.perf_counter()
        engine.step()
        rows = len(engine.scheduler.running)
        seats = max(seats, len(engine.scheduler.seated))
        if rows == len(seqs):
            steps.append(time.perf_counter() - started)
    total = time.perf_counter() - began
    print(
        f"{len(seqs)} texts of {asked.tokens} tokens: {seats} seats at once, {total:.1f} s, "
        f"gave way {engine.gave_way}, a step of all {median(steps or [0]) * 1e3:.2f} ms"
    )
    return seqs


def alone(engine: Engine, seqs: list[Sequence]) -> None:
    differing = 0
    for seq in seqs[:: len(seqs) // ALONE][:ALONE]:
        twin = Sequence(seq.tokens[: seq.prompt_len], seq.sampling, max_tokens=TOKENS)
        engine.run_to_end([twin])
        differing += twin.tokens != seq.tokens
    print(f"{ALONE} of them alone: {differing} differ")


def one_user(engine: Engine, name: str) -> None:
    seq, steps = Sequence(list(range(3, 515)), max_tokens=STEPS + 20), []
    engine.submit(seq)
    while not engine.idle:
        started = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - started)
    print(f"one user, {name}: {median(steps[20:-5]) * 1e3:.3f} ms a cycle")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--dtype", default="fp8")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--max-len", type=int, default=131_072)
    parser.add_argument("--tokens", type=int, default=4_000)
    parser.add_argument("--free", type=float)
    parser.add_argument("--tp", type=int, default=1)
    asked = parser.parse_args()
    free = min(torch.cuda.mem_get_info(card)[0] for card in range(asked.tp))
    taken = 0 if asked.free is None else int(free - asked.free * GIB)
    held = [torch.empty(max(0, taken), dtype=torch.uint8, device=c) for c in range(asked.tp)]
    print(
        f"{asked.tp} x {torch.cuda.get_device_name()}, {(free - len(held[0])) / GIB:.1f} GiB free"
    )
    one_user(make_engine(loaded(asked, 1, 4096), speculation()), "whole slots")
    gc.collect()
    torch.cuda.empty_cache()
    began = time.perf_counter()
    model = loaded(asked, asked.slots, asked.max_len)
    pages = model.target.pages
    plan = None if pages is None else pages.plan
    print(
        f"{asked.slots} x {asked.max_len} tokens: {plan}, loaded in "
        f"{time.perf_counter() - began:.1f} s"
    )
    if plan is not None:
        print({n: plan.texts(n, asked.slots) for n in (4_000, 32_000, asked.max_len)})
    engine = make_engine(model, speculation())
    one_user(engine, "pages" if plan else "whole slots")
    alone(engine, all_at_once(asked, engine))


if __name__ == "__main__":
    main()
