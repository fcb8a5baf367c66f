"""The ids that one card says, for another card to be held against: random weights of true size,
prompts of 50 and of 3,000 tokens, greedy and sampled, plain and with guesses.

    PYTHONPATH=. python docs/log/ids.py OUT.json gemma-4-31b:fp8 gemma-4-31b:fp8-w8a8
    PYTHONPATH=. python docs/log/ids.py --compare ONE.json OTHER.json
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from specdec.assembly.engine import make_engine
from specdec.assembly.model import Model, random_model
from specdec.core.config import ModelConfig, SpeculationConfig
from specdec.core.types import Sampling, Sequence

PROMPTS = 20
WORDS = 250_000
WAYS = {
    "greedy": Sampling(),
    "T 1, top-k 64, top-p 0.95": Sampling(temperature=1.0, top_k=64, top_p=0.95),
}


def sequences(length: int, sampling: Sampling, tokens: int) -> list[Sequence]:
    """The same prompts on every card, each with a seed of its own."""
    random = Random(length)
    prompts = [[random.randrange(2, WORDS) for _ in range(length)] for _ in range(PROMPTS)]
    return [
        Sequence(list(ids), replace(sampling, seed=seed), max_tokens=tokens)
        for seed, ids in enumerate(prompts)
    ]


def said(model: Model, drafter: str, length: int, way: str, tokens: int) -> list[list[int]]:
    engine = make_engine(model, SpeculationConfig(drafter=drafter, k=4))
    asked = sequences(length, WAYS[way], tokens)
    engine.run_to_end(asked)
    return [one.tokens for one in asked]


def measured(name: str, dtype: Any, tokens: int) -> dict[str, object]:
    config = ModelConfig(backend="cuda", dtype=dtype, slots=PROMPTS, max_len=3584)
    model = random_model(name, config, SpeculationConfig(drafter="ngram", k=4))
    cases: dict[str, object] = {}
    for length in (50, 3000):
        for way in WAYS:
            plain = said(model, "none", length, way, tokens)
            drafted = said(model, "ngram", length, way, tokens)
            cases[f"{name}, {dtype}, {length}, {way}"] = {
                "tokens": sum(map(len, plain)),
                "different": len({tuple(ids) for ids in plain}),
                "lossless": plain == drafted,
                "sha256": hashlib.sha256(json.dumps(plain).encode()).hexdigest(),
            }
            print(f"{list(cases)[-1]}: {list(cases.values())[-1]}", flush=True)
    return cases


def compare(one: Path, other: Path) -> None:
    a, b = (json.loads(path.read_text()) for path in (one, other))
    equal = [name for name in a["cases"] if a["cases"][name] == b["cases"].get(name)]
    tokens = sum(a["cases"][name]["tokens"] for name in equal)
    print(f"{a['card']} and {b['card']}: {len(equal)} of {len(a['cases'])} cases equal")
    print(f"{tokens} ids, prompts among them")
    sys.exit(len(equal) != len(a["cases"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--compare", type=Path, nargs=2)
    parser.add_argument("models", nargs="*", help="NAME:DTYPE")
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.parse_args()
    if options.compare:
        compare(*options.compare)
    import torch

    cases: dict[str, object] = {}
    for one in options.models:
        name, dtype = one.split(":")
        cases |= measured(name, dtype, options.tokens)
        gc.collect()
        torch.cuda.empty_cache()
        card = torch.cuda.get_device_name()
        options.out.write_text(json.dumps({"card": card, "cases": cases}, indent=1))


if __name__ == "__main__":
    main()
