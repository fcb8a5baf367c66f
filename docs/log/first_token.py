"""Milliseconds to the first token by prompt length, on a card: the target alone, as the host sees
it, random weights, median of six in each of two rounds.

    PYTHONPATH=. python docs/log/first_token.py OUT.json --random gemma-4-26b-a4b --dtype int4
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

from drafters import registry
from specdec.cli.start import loaded_model
from specdec.core.config import ModelConfig
from specdec.core.protocols import Target
from specdec.core.provenance import gpus
from specdec.core.types import Sampling, Sequence

ROUNDS, TIMES = 2, 6


def first_token_ms(target: Target, prompt: list[int]) -> float:
    seq = Sequence(prompt, Sampling(), max_tokens=2, slot=0)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for start in range(0, len(prompt), target.prefill_chunk):
        target.prefill(seq, start, min(start + target.prefill_chunk, len(prompt)))
    return 1e3 * (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--random", default="gemma-4-31b")
    parser.add_argument("--dtype", default="fp8")
    parser.add_argument("--prefill-copy", action="store_true")
    parser.add_argument("--lengths", default="128,1200,8192")
    given = parser.parse_args()
    lengths = [int(length) for length in given.lengths.split(",")]
    copy, longest = given.prefill_copy, max(lengths) + 64
    config = ModelConfig(
        backend="cuda", dtype=given.dtype, slots=1, max_len=longest, prefill_copy=copy
    )
    plain = registry.resolved(registry.config_type()(drafter="none", k=0), config, random=True)
    target = loaded_model(config, plain, random=given.random).target
    random, found = np.random.default_rng(0), {str(length): [] for length in lengths}
    for length in lengths * ROUNDS:
        prompt = random.integers(3, 20_000, length).tolist()
        first_token_ms(target, prompt)
        times = [first_token_ms(target, prompt) for _ in range(TIMES)]
        found[str(length)].append(round(median(times), 2))
    asked = vars(given) | {"out": None}
    given.out.write_text(json.dumps({"gpus": gpus(), "asked": asked, "ms": found}, indent=1) + "\n")
    print(found)


if __name__ == "__main__":
    main()
