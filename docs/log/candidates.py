"""How many words a certified head leaves to be computed, on real text.

    PYTHONPATH=. python docs/log/candidates.py prompts.jsonl [--limit 8] [--tokens 48]

mini by the CUDA target's reference in bfloat16, on a CPU: bounds are the kernels' own, a row's
threshold is exact, where kernels take the largest of 256 parts of a row. For each way of choosing:
the candidates of a row, and rows with more than there is room for.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.types import Sampling, Sequence
from specdec.evaluation.prompts import read_prompts
from targets import mini
from targets.cuda.candidates import ROOM
from targets.cuda.load import CudaOptions, load_target
from targets.cuda.target import CudaTarget
from targets.tokenizer import load_tokenizer

WAYS = {
    "greedy": Sampling(),
    "T 1": Sampling(temperature=1.0, seed=1),
    "T 1, top-k 64, top-p 0.95": Sampling(temperature=1.0, top_k=64, top_p=0.95, seed=1),
}


def counted(target: CudaTarget, counts: list[int]) -> None:
    """Note each row's candidates from now on."""
    inner = target.ops.candidates

    def candidates(*given: object) -> torch.Tensor:
        logits = inner(*given)  # type: ignore[arg-type]
        counts.extend((logits > -torch.inf).sum(-1).tolist())
        return logits

    target.ops.candidates = candidates


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    given = parser.parse_args()
    options = CudaOptions(slots=1, max_len=1024, dtype="bfloat16", device="cpu")
    target, tokenizer = load_target(mini.path("mini"), options), load_tokenizer(mini.path("mini"))
    counts: list[int] = []
    counted(target, counts)
    prompts = [tokenizer.encode(p.text)[-400:] for p in read_prompts(given.prompts, given.limit)]
    print(f"{target.vocab} words, room for {ROOM}; {len(prompts)} prompts")
    for name, sampling in WAYS.items():
        counts.clear()
        for ids in prompts:
            engine = Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 0))
            engine.run_to_end([Sequence(list(ids), sampling, max_tokens=given.tokens)])
        half, most, last = np.percentile(counts, [50, 99, 100])
        over = sum(count > ROOM for count in counts)
        spread = f"p50 {half:.0f}, p99 {most:.0f}, most {last:.0f}, over {over}"
        print(f"{name:28} {len(counts)} rows: {spread}")


if __name__ == "__main__":
    main()
