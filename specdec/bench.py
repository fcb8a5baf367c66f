"""Step times and end-to-end speed of one target, as ratios measured side by side in one run.

Contexts are really filled and each row has its own. A step is a whole host cycle: feed, verify,
choose, copy the ids back. Knows nothing of frameworks: what it needs of the device is given to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from specdec.engine import Engine
from specdec.protocols import Target
from specdec.types import NO_GUESS, Sampling, Sequence


@dataclass(frozen=True)
class StepTime:
    """Seconds per step: median and the middle half's spread over `samples` steps."""

    batch: int
    context: int
    width: int
    seconds: float
    quartiles: tuple[float, float]
    samples: int


@dataclass(frozen=True)
class Run:
    """One end-to-end run: decode tokens per second without the first token, and what was said."""

    name: str
    tokens_per_second: float
    tau: float
    tokens: int
    digest: str


def fill(target: Target, batch: int, context: int, vocab: int) -> list[Sequence]:
    """Prefill `batch` random texts of `context` tokens, each in its own slot."""
    random = np.random.default_rng(0)
    seqs = []
    for slot in range(batch):
        seq = Sequence([int(t) for t in random.integers(3, vocab, context)], max_tokens=10**9)
        seq.slot = slot
        for start in range(0, context, target.prefill_chunk):
            target.prefill(seq, start, min(context, start + target.prefill_chunk))
        seq.tokens.append(3)
        seqs.append(seq)
    return seqs


def step_time(target: Target, seqs: list[Sequence], k: int, samples: int = 50) -> StepTime:
    """Time verify at this context. The same positions are fed again and again: nothing grows."""
    draft = np.full((len(seqs), k), NO_GUESS, np.int32)
    times = []
    for i in range(samples + 5):
        started = time.perf_counter()
        np.asarray(target.verify(seqs, draft).chosen)
        if i >= 5:  # compiled and warm
            times.append(time.perf_counter() - started)
    low, middle, high = np.quantile(times, [0.25, 0.5, 0.75])
    context = len(seqs[0].tokens)
    width = target.max_draft + 1
    return StepTime(len(seqs), context, width, float(middle), (float(low), float(high)), samples)


def end_to_end(
    name: str, make_engine: Callable[[], Engine], prompts: list[list[int]], max_tokens: int
) -> Run:
    """Decode the prompts twice and time the second run; seeded sampling at T = 0.8."""
    for _ in range(2):
        engine = make_engine()
        seqs = [
            Sequence(list(p), Sampling(temperature=0.8, top_p=0.95, seed=i), max_tokens=max_tokens)
            for i, p in enumerate(prompts)
        ]
        for seq in seqs:
            engine.submit(seq)
        while not engine.idle and (engine.scheduler.waiting or engine.scheduler.prefilling):
            engine.step()
        emitted, started = sum(s.emitted for s in seqs), time.perf_counter()
        while not engine.idle:
            engine.step()
        seconds = time.perf_counter() - started
    tokens = sum(s.emitted for s in seqs)
    ids = [s.tokens[s.prompt_len :] for s in seqs]
    digest = sha256(repr(ids).encode()).hexdigest()
    return Run(name, (tokens - emitted) / seconds, engine.acceptance.tau, tokens, digest)
