"""What users of a mixed load wait for, in process: gaps of others while prompts are read, prompts
that come at once, a long text beside short ones, and the start at many slots.

    PYTHONPATH=. python docs/log/mixed.py

31B of true size with random weights, no drafter; needs a Hopper card with 141 GB.
"""

from __future__ import annotations

import gc
import statistics
import time
from itertools import pairwise

import torch

from drafters import registry
from specdec.assembly.engine import serving_engine
from specdec.assembly.model import random_model
from specdec.core.config import ModelConfig, PrefixConfig
from specdec.core.engine import Engine
from specdec.core.types import Sequence

NAME = "gemma-4-31b"
SETTLED = 60
"""Steps of streams before others' prompts come, and of a batch that is timed."""


def prompts(count: int, length: int, seed: int = 0) -> list[Sequence]:
    return [
        Sequence([(7919 * (i + 31 * s) + 3) % 50000 + 10 for i in range(length)], max_tokens=4000)
        for s in range(seed, seed + count)
    ]


def engine_of(dtype: str, slots: int, max_len: int) -> Engine:
    """Prints how long it takes from loaded weights to serving."""
    options = {"dtype": dtype, "kv_dtype": "fp8", "slots": slots, "max_len": max_len}
    config = ModelConfig(NAME, backend="cuda", **options)
    plain = registry.config_type()(drafter="none", k=0)
    speculation = registry.resolved(plain, config, random=True)
    model = random_model(NAME, config, speculation)
    torch.cuda.synchronize()
    began = time.perf_counter()
    engine = serving_engine(model, speculation, 1024, PrefixConfig(prefix_cache=False))
    print(f"{options}: serving {time.perf_counter() - began:.1f} s after its weights", flush=True)
    return engine


def clear(engine: Engine, seqs: list[Sequence]) -> None:
    for seq in seqs:
        seq.cancelled = True
    while not engine.idle:
        engine.step()


def waits(engine: Engine, streams: int, others: list[Sequence], label: str) -> None:
    """First tokens of others' prompts, and gaps of streams beside them."""
    running = prompts(streams, 100)
    shown: dict[Sequence, list[float]] = {seq: [] for seq in (*running, *others)}
    for seq in running:
        engine.submit(seq)
    for _ in range(SETTLED if streams else 0):
        engine.step()
    for seq in others:
        engine.submit(seq)
    sent, steps = time.perf_counter(), 0
    while not all(shown[seq] for seq in others) or (not others and steps < 2 * SETTLED):
        steps += 1
        for event in engine.step():
            shown[event.sequence].append(1e3 * (time.perf_counter() - sent))
    firsts = sorted(shown[seq][0] for seq in others)
    line = f"{label}: {steps} steps"
    if firsts:
        line += f"; first tokens {firsts[0]:.0f}, {statistics.median(firsts):.0f} (median)"
        line += f", {firsts[-1]:.0f} ms"
    gaps = [b - a for seq in running for a, b in pairwise(shown[seq])]
    if gaps:
        line += f"; gaps {statistics.median(gaps):.1f} (median), {max(gaps):.1f} ms"
    print(line, flush=True)
    clear(engine, [*running, *others])


def mixed() -> None:
    engine = engine_of("fp8", 8, 8448)
    for _ in range(2):
        waits(engine, 4, [], "4 streams")
        for length in (1200, 8000):
            waits(engine, 4, prompts(1, length, 100), f"4 streams, a prompt of {length}")
        waits(engine, 0, prompts(1, 8000, 100), "a prompt of 8000")
        for length in (500, 1200):
            waits(engine, 0, prompts(4, length, 100), f"4 prompts of {length} at once")


def at_once() -> None:
    engine = engine_of("fp8-w8a8", 64, 1024)
    for length in (20, 60, 120, 250):
        waits(engine, 0, prompts(64, length, 100), f"64 prompts of {length} at once")


def beside_a_long_text() -> None:
    engine = engine_of("fp8", 32, 32768 + 512)
    for last in (400, 32000, 400, 32000):
        seqs = [*prompts(31, 400), *prompts(1, last, 100)]
        for seq in seqs:
            engine.submit(seq)
        while len(engine.scheduler.running) < len(seqs):
            engine.step()
        began = time.perf_counter()
        for _ in range(SETTLED):
            engine.step()
        step = 1e3 * (time.perf_counter() - began) / SETTLED
        print(f"31 rows at 400 tokens, one at {last}: {step:.2f} ms a step", flush=True)
        clear(engine, seqs)


def many_slots() -> None:
    engine_of("fp8-w8a8", 256, 256)


def main() -> None:
    print(torch.cuda.get_device_name())
    for part in (mixed, at_once, beside_a_long_text, many_slots):
        part()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
