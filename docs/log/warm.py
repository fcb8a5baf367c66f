"""What a warm turn costs beside a cold one: time to first token of a prompt of which 16,384 tokens
are known, from device memory and from host memory, by prefill chunk; and whether both say the same.

    PYTHONPATH=. python3 docs/log/warm.py OUT.json           # 31B's size in FP8, on a Hopper GPU
    PYTHONPATH=. python3 docs/log/warm.py OUT.json --model mini --device cpu --shared 512 \
        --chunks 128 --max-len 1024 --alone 256 --dtype float32      # the same, tried on a CPU
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drafters import registry
from specdec.assembly.engine import make_engine, warm_up
from specdec.assembly.model import load_model, random_model
from specdec.assembly.prefix import UNBOUNDED
from specdec.core.config import ModelConfig, PrefixConfig
from specdec.core.engine import Engine
from specdec.core.provenance import gpus, run_record
from specdec.core.types import Reuse, Sampling, Sequence
from targets import mini
from targets.backend import snapshots_of
from targets.cuda import load

TURNS = 5
ANSWER = 16
BEYOND = 100
"""Tokens of the earlier turn that fill no chunk."""
NEWS = 300
"""Tokens that the turn at hand adds."""


def first_token(
    engine: Engine, tokens: list[int], reuse: Reuse | None
) -> tuple[float, Sequence, Any]:
    """Milliseconds from submission to the first token; then a short answer."""
    seq = Sequence(list(tokens), Sampling(seed=1, logprobs=1), max_tokens=ANSWER, reuse=reuse)
    settle(engine)
    began, took, logprobs = time.perf_counter(), 0.0, []
    engine.submit(seq)
    while not engine.idle:
        for event in engine.step():
            assert event.error is None, event.error
            took = took or (time.perf_counter() - began) * 1e3
            logprobs += event.logprobs or ()
    return took, seq, logprobs


def settle(engine: Engine) -> None:
    if engine.target.device.type == "cuda":
        torch.cuda.synchronize()


def empty_device(engine: Engine) -> None:
    """All that is kept goes to the host."""
    assert engine.prefix_cache is not None
    while engine.prefix_cache.give_way():
        pass
    settle(engine)


def measured(engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    """Medians in ms."""
    cache = engine.prefix_cache
    assert cache is not None, "the context is no longer than a chunk"
    random = np.random.default_rng(0)

    def words(count):
        return random.integers(3, 4000, count).tolist()

    times: dict[str, list[float]] = {name: [] for name in ("cold", "keeping", "device", "host")}
    alone = [first_token(engine, words(options.alone), None)[0] for _ in range(TURNS)]
    equal, found = True, set()
    for _ in range(TURNS):
        for place in ("device", "host"):
            cache.clear()
            cache.pool.budget.device = UNBOUNDED
            before = words(options.shared + BEYOND)
            times["keeping"].append(first_token(engine, before, Reuse())[0])
            prompt = before + words(NEWS)
            cold = first_token(engine, prompt, None)  # it dirties the slot, too
            if place == "host":
                empty_device(engine)
            warm = first_token(engine, prompt, Reuse())
            times["cold"].append(cold[0])
            times[place].append(warm[0])
            found.add(warm[1].cached)
            equal &= (warm[1].tokens, warm[2]) == (cold[1].tokens, cold[2])
    ms = {name: round(statistics.median(values), 2) for name, values in times.items()}
    return {
        "unit": cache.unit,
        "cached": sorted(found),
        "of": options.shared + BEYOND + NEWS,
        "equal": equal,
        "first token, ms": ms,
        f"first token of {options.alone}, ms": round(statistics.median(alone), 2),
        "device / cold": round(ms["device"] / ms["cold"], 4),
        "host / cold": round(ms["host"] / ms["cold"], 4),
        "keeping / cold": round(ms["keeping"] / ms["cold"], 4),
        "all, ms": {name: [round(v, 2) for v in values] for name, values in times.items()},
    }


def engine_of(options: argparse.Namespace, chunk: int) -> Engine:
    load.CHUNKS[options.device] = chunk
    config = ModelConfig(
        options.model,
        backend="cuda",
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        device=options.device,
        max_len=options.max_len,
        slots=2,
    )
    asked = registry.config_type()(drafter=options.drafter, k=options.k)
    embedded = options.model in mini.NAMES
    asked = registry.resolved(asked, config, random=not embedded)
    model = load_model(config, asked) if embedded else random_model(options.model, config, asked)
    engine = make_engine(model, asked, prefix=PrefixConfig(True, options.cache_ram))
    warm_up(engine, [Sampling(logprobs=1)], *model.backend.warm(model.target))
    spare = snapshots_of(model.target).spare_bytes()
    print(f"spare device memory: {spare / 2**30:.1f} GiB", flush=True)
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="gemma-4-31b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", default="fp8")
    parser.add_argument("--kv-dtype")
    parser.add_argument("--drafter", default="eagle3")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--chunks", default="2048,1024,512", help="prefill chunks to try")
    parser.add_argument("--shared", type=int, default=16384)
    parser.add_argument("--alone", type=int, default=8192, help="a cold prompt, by chunk")
    parser.add_argument("--max-len", type=int, default=20480)
    parser.add_argument("--cache-ram", type=float, default=16)
    options = parser.parse_args()
    rows = {}
    for chunk in map(int, options.chunks.split(",")):
        engine = engine_of(options, chunk)
        row = rows[chunk] = measured(engine, options)
        ms = row["first token, ms"]
        print(
            f"chunk {chunk}: cold {ms['cold']} ms (keeping {ms['keeping']}), from device "
            f"{ms['device']} ({row['device / cold']}), from host {ms['host']} "
            f"({row['host / cold']}); {options.alone} alone "
            f"{row[f'first token of {options.alone}, ms']}; cached {row['cached']}, "
            f"equal {row['equal']}",
            flush=True,
        )
        record = run_record(
            options.device, gpus=gpus(), options=vars(options) | {"out": str(options.out)}
        )
        options.out.write_text(json.dumps(record | {"chunks": rows}, indent=1) + "\n")
        del engine
        gc.collect()  # captured graphs refer to what they were captured of
        if options.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
