"""Step times and end-to-end speed of one target, as ratios measured side by side in one run.

Contexts are really filled, and each row has its own. The module imports no framework; targets and
engines are passed in. Each function returns samples; `aggregate.py` makes figures of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence as Seqs
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from specdec.core.engine import Engine
from specdec.core.errors import UserError
from specdec.core.protocols import Target
from specdec.core.stats import Acceptance
from specdec.core.types import Array, Sampling, Sequence

STEPS = 30
"""Forwards that are timed."""
WARM_STEPS = 5
"""Forwards before the timed ones."""
CYCLE_SAMPLES = 20
"""Samples of a cycle's time."""
CYCLES_EACH = 4
"""Cycles per sample: several, because a driver may return many rounds at once, or those of the
dispatch before."""
FIRST_TOKENS = 5
ROOM = 128
"""Tokens that a context needs beyond itself to be timed."""
ENDLESS = 10**9
NUCLEUS = Sampling(temperature=0.8, top_p=0.95)


@dataclass(frozen=True)
class Run:
    """One end-to-end run: decode tokens per second without the first token, and a digest of the
    answers."""

    name: str
    tokens_per_second: float
    tau: float
    tokens: int
    digest: str


def random_prompts(batch: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """A text of its own for each row."""
    return np.random.default_rng(seed).integers(3, vocab, (batch, length)).tolist()


def fill(target: Target, batch: int, context: int, vocab: int) -> list[Sequence]:
    """Prefill `batch` random texts of `context` tokens, each in its own slot. Raises UserError
    where the memory does not hold them at once."""
    seqs = []
    for slot, tokens in enumerate(random_prompts(batch, context, vocab)):
        seq = Sequence(tokens, max_tokens=ENDLESS)
        seq.slot = slot
        try:
            for start in range(0, context, target.prefill_chunk):
                target.prefill(seq, start, min(context, start + target.prefill_chunk))
        except MemoryError as problem:
            raise UserError(
                f"{batch} texts of {context} tokens don't fit at once ({problem}): choose fewer "
                "--batches or shorter --contexts"
            ) from problem
        seq.tokens.append(3)
        seqs.append(seq)
    return seqs


def some_draft(seqs: Seqs[Sequence], k: int) -> Array:
    """A draft [B, k] of ids out of the texts. NO_GUESS would be cheaper to verify: no experts are
    read for it."""
    return np.array([np.resize(seq.tokens, k) for seq in seqs], np.int32)


def step_samples(target: Target, seqs: list[Sequence], k: int) -> list[float]:
    """Seconds of whole host steps: feed, verify, choose, copy the ids back. The same positions are
    fed again and again: nothing grows."""
    draft, times = some_draft(seqs, k), []
    for _ in range(WARM_STEPS + STEPS):
        started = time.perf_counter()
        np.asarray(target.verify(seqs, draft).chosen)
        times.append(time.perf_counter() - started)
    return times[WARM_STEPS:]


def cycle_samples(engine: Engine, prompts: list[list[int]]) -> list[float]:
    """Seconds per cycle of either loop, with drafting, accepting, emitting and the host's work.

    Texts grow as they are decoded; it stops early if one reaches the end of its context.
    """
    rounds, inner = 0, engine.cycle

    def counted(seqs, single):
        nonlocal rounds
        done = inner(seqs, single)
        rounds += len(done)
        return done

    engine.cycle = counted
    seqs = [Sequence(list(p), max_tokens=ENDLESS) for p in prompts]
    prefilled(engine, seqs)
    for _ in range(WARM_STEPS):
        engine.step()
    samples = []
    while len(samples) < CYCLE_SAMPLES:
        before, started = rounds, time.perf_counter()
        while rounds < before + CYCLES_EACH and len(engine.scheduler.running) == len(seqs):
            engine.step()
        if len(engine.scheduler.running) < len(seqs):
            break
        samples.append((time.perf_counter() - started) / (rounds - before))
    for seq in seqs:
        seq.cancelled = True
    engine.step()
    return samples


def first_token_samples(engine: Engine, length: int, vocab: int) -> list[float]:
    """Seconds from submitting a prompt of this length to its first token, on an idle engine."""
    times = []
    for i in range(FIRST_TOKENS + 1):
        (prompt,) = random_prompts(1, length, vocab, seed=i)
        seq, started = Sequence(prompt, max_tokens=1), time.perf_counter()
        engine.run_to_end([seq])
        times.append(time.perf_counter() - started)
    return times[1:]


def end_to_end(
    name: str,
    make_engine: Callable[[], Engine],
    prompts: list[list[int]],
    max_tokens: int,
    sampling: Sampling = NUCLEUS,
) -> Run:
    """Decode the prompts twice and time the second run, from when all prompts are read: every row
    decodes from the start on, and none has to be compiled or captured for."""
    emitted, started, seconds, engine, seqs = 0, 0.0, 0.0, make_engine(), []
    for _ in range(2):
        engine.acceptance = Acceptance()
        seqs = [
            Sequence(list(p), sampling, max_tokens=max_tokens, request_id=str(row))
            for row, p in enumerate(prompts)
        ]
        prefilled(engine, seqs)
        emitted, started = sum(s.emitted for s in seqs), time.perf_counter()
        while not engine.idle:
            engine.step()
        seconds = time.perf_counter() - started
    tokens = sum(s.emitted for s in seqs)
    ids = [s.tokens[s.prompt_len :] for s in seqs]
    digest = sha256(repr(ids).encode()).hexdigest()
    return Run(name, (tokens - emitted) / seconds, engine.acceptance.tau, tokens, digest)


def prefilled(engine: Engine, seqs: list[Sequence]) -> None:
    """Prefill all prompts, one chunk per step, without decoding in between: with many rows, the
    first would otherwise end before the last is prefilled."""
    cycle, engine.cycle = engine.cycle, lambda seqs, single: []
    for seq in seqs:
        engine.submit(seq)
    while engine.scheduler.waiting or engine.scheduler.prefilling:
        engine.step()
    engine.cycle = cycle
