"""One model on several cards beside the same on one: equal ids in a random campaign, and times.

    PYTHONPATH=. python docs/log/cards.py gemma-4-31b --dtype fp8 --tp 2 --tokens 30000 --timed

Random weights of true size, the same on all. Each round of the campaign draws a drafter, a loop, K,
and rows with prompts of up to 1,024 tokens, sampling parameters, log-probabilities and constraints
of their own; ids and log-probabilities are compared bit for bit. A long prompt's are compared cold
and warm, on the cards alone: one card reads it by other kernels. Needs `--tp` Hopper cards.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch

from drafters import registry
from specdec.assembly.engine import make_engine, serving_engine
from specdec.assembly.model import Model, random_model
from specdec.core.config import ModelConfig, PrefixConfig
from specdec.core.engine import Engine
from specdec.core.types import Sampling, Sequence
from tests.support.constrained import EveryThird

MOST_K = 7
LONGEST = 1024
"""Tokens of a prompt up to which one card and several have the same bits."""
LONG = 9000
"""Tokens of the prompt that is read cold and warm."""
OUTPUT = 256
"""Tokens of an answer at most."""
REPORTED = 5
"""Rounds between two lines of progress."""
TIMED = 60
"""Steps that are timed."""
SETTLED = 10
"""Steps before these."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("--dtype", default="fp8")
    parser.add_argument("--kv-dtype", default="fp8")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=30000, help="of the campaign; 0 for none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timed", action="store_true", help="times too")
    parser.add_argument("--auto-with", default="none", help="a drafter with weights")
    parser.add_argument("--draft-model", help="a public model, for --auto-with model")
    return parser.parse_args()


def model_of(asked: argparse.Namespace, tp: int, slots: int = 8, max_len: int = 9216) -> Model:
    began = time.perf_counter()
    kv = {"kv_dtype": asked.kv_dtype, "dtype": asked.dtype, "max_len": max_len}
    config = ModelConfig(asked.name, backend="cuda", slots=slots, tp=tp, **kv)
    model = random_model(asked.name, config, speculation(asked, "auto", MOST_K))
    print(f"{tp} cards: loaded in {time.perf_counter() - began:.1f} s", flush=True)
    return model


def speculation(asked: argparse.Namespace, drafter: str, k: int, loop: str | None = None):
    weighted = asked.auto_with if drafter == "auto" else None
    own = {"draft_model": asked.draft_model} if drafter in ("auto", asked.auto_with) else {}
    made = registry.config_type()(drafter=drafter, k=k, loop=loop, auto_with=weighted, **own)
    return registry.resolved(made, ModelConfig("x"), random=True)


def rows(random: np.random.Generator, count: int, vocab: int) -> list[Sequence]:
    made = []
    for _ in range(count):
        length = int(random.choice([3, 17, 60, 128, 200, 400, 512, 700, LONGEST]))
        text = random.integers(3, vocab, length)
        text = np.tile(text[: max(3, length // 4)], 4)[:length]  # for lookups to find
        warm = random.random() < 0.6
        sampling = Sampling(
            temperature=float(random.choice([0.3, 1.0, 1.7])) if warm else 0.0,
            top_p=float(random.choice([0.7, 1.0])),
            top_k=int(random.choice([0, 40])),
            min_p=float(random.choice([0.0, 0.05])),
            repetition_penalty=float(random.choice([1.0, 1.2])),
            seed=int(random.integers(1 << 40)),
            logprobs=int(random.choice([0, 5])) if random.random() < 0.3 else None,
        )
        constraint = None
        if random.random() < 0.2:
            constraint = EveryThird()
        seq = Sequence(text.tolist(), sampling, max_tokens=int(random.integers(8, OUTPUT)))
        seq.constraint = constraint
        made.append(seq)
    return made


def played(
    asked: argparse.Namespace, model: Model, number: int, vocab: int
) -> tuple[list[list[int]], list[list[Any]], str]:
    """The ids and log-probabilities of a round, and what it was."""
    random = np.random.default_rng(number)
    weighted = [] if asked.auto_with == "none" else [asked.auto_with] * 2
    drafter = str(random.choice(["none", "ngram", "suffix", "auto", *weighted]))
    loop = str(random.choice(["host", "device"]))
    if (drafter, loop) == ("suffix", "device"):
        drafter = "auto"
    k = int(random.integers(1, MOST_K + 1)) if drafter != "none" else 0
    if drafter not in model.drafters:
        drafter = "auto"
    engine = make_engine(model, speculation(asked, drafter, k, loop))
    seqs = rows(random, int(random.integers(1, 14)), vocab)
    for seq in seqs:
        engine.submit(seq)
    details: dict[int, list[Any]] = {}
    while not engine.idle:
        for event in engine.step():
            assert event.error is None, event.error
            number = next(i for i, seq in enumerate(seqs) if seq is event.sequence)
            own = event.logprobs or (None,) * len(event.tokens)
            details.setdefault(number, []).extend(own)
    found = [details[i] for i in range(len(seqs))]
    return [seq.tokens for seq in seqs], found, f"{drafter} {loop} K = {k}, {len(seqs)} rows"


def campaign(asked: argparse.Namespace, one: Model, several: Model) -> None:
    tokens = number = wrong = 0
    rounds: dict[str, int] = {}
    while tokens < asked.tokens:
        ours, details, what = played(asked, several, asked.seed + number, one.target.vocab)
        theirs, expected, _ = played(asked, one, asked.seed + number, one.target.vocab)
        made = sum(map(len, details))
        wrong += ours != theirs or details != expected
        if ours != theirs:
            print(f"round {asked.seed + number} differs: {what}", flush=True)
        tokens, number = tokens + made, number + 1
        if number % REPORTED == 0:
            print(f"{tokens} tokens in {number} rounds so far: {wrong} differ", flush=True)
        rounds[what.split(" K")[0]] = rounds.get(what.split(" K")[0], 0) + 1
    print(f"{tokens} tokens in {number} rounds {rounds}: {wrong} differ")


def long_prompt(asked: argparse.Namespace, several: Model) -> None:
    """Cold, warm, and warm beside others. It is so long that global layers deal more lanes."""
    prefix = PrefixConfig()
    engine = make_engine(several, speculation(asked, "auto", MOST_K), prefix=prefix)
    text = np.random.default_rng(1).integers(3, 5000, LONG).tolist()
    answers = []
    for beside in (0, 0, 5):
        seqs = [Sequence(list(text), Sampling(temperature=1.0, seed=3), max_tokens=40)]
        seqs += [Sequence(text[:n], Sampling(seed=n), max_tokens=40) for n in range(9, 9 + beside)]
        engine.run_to_end(seqs)
        answers.append(seqs[0].tokens)
    print(f"{LONG} tokens, cold, warm, beside others: equal {answers[1:] == answers[:1] * 2}")


def step_ms(engine: Engine, count: int, context: int = 512) -> float:
    seqs = [Sequence([7 + i] * context, max_tokens=400) for i in range(count)]
    for seq in seqs:
        engine.submit(seq)
    while len(engine.scheduler.running) < count:
        engine.step()
    for _ in range(SETTLED):
        engine.step()
    began = time.perf_counter()
    for _ in range(TIMED):
        engine.step()
    taken = (time.perf_counter() - began) / TIMED * 1e3
    for seq in seqs:
        seq.cancelled = True
    while not engine.idle:
        engine.step()
    return taken


def first_token_ms(engine: Engine, length: int) -> float:
    """Median of five, each of another text."""
    taken = []
    for seed in range(5):
        text = np.random.default_rng(seed).integers(3, 5000, length).tolist()
        seq = Sequence(text, max_tokens=1)
        began = time.perf_counter()
        engine.run_to_end([seq])
        taken.append((time.perf_counter() - began) * 1e3)
    return statistics.median(taken)


def verify_ms(model: Model, width: int) -> float:
    seq = Sequence([7] * 512, max_tokens=40)
    seq.slot = 0
    model.target.prefill(seq, 0, 512)
    seq.tokens.append(5)
    draft = np.full((1, width - 1), 7, np.int32)
    for _ in range(SETTLED):
        model.target.verify([seq], draft)
    began = time.perf_counter()
    for _ in range(TIMED):
        model.target.verify([seq], draft)
    return (time.perf_counter() - began) / TIMED * 1e3


def timed(asked: argparse.Namespace, model: Model, tp: int) -> None:
    plain = speculation(asked, "none", 0)
    began = time.perf_counter()
    engine = serving_engine(model, plain, 256, PrefixConfig(prefix_cache=False))
    print(f"{tp} cards: warm after {time.perf_counter() - began:.1f} s")
    for count in (1, 8):
        ms = step_ms(engine, count)
        print(f"{tp} cards, {count} rows: {ms:.3f} ms a step, {count / ms * 1e3:.1f} tok/s")
    for k in (3, 7) if asked.auto_with != "none" else ():
        own = speculation(asked, asked.auto_with, k)
        drafting = serving_engine(model, own, 256, PrefixConfig(prefix_cache=False))
        for count in (1, 8):
            ms = step_ms(drafting, count)
            print(f"{tp} cards, {count} rows, {asked.auto_with} K = {k}: {ms:.3f} ms a cycle")
    widths = {width: verify_ms(model, width) for width in (1, 5, 8)}
    print(f"{tp} cards, verify by host: { ({w: round(ms, 3) for w, ms in widths.items()}) } ms")
    for length in (128, 512, 1000, 8192):
        print(f"{tp} cards, first token of {length}: {first_token_ms(engine, length):.1f} ms")


def main() -> None:
    asked = options()
    print(f"{asked}, {torch.cuda.get_device_name()} x {torch.cuda.device_count()}", flush=True)
    one, several = model_of(asked, 1), model_of(asked, asked.tp)
    if asked.timed:
        timed(asked, one, 1)
        timed(asked, several, asked.tp)
    if asked.tokens:
        campaign(asked, one, several)
        long_prompt(asked, several)


if __name__ == "__main__":
    main()
