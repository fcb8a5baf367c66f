"""What a plain step takes by how its tokens are chosen: greedy, sampled with nothing cut, and by
Gemma's own default; and greedy with a whole head, and where every step has more candidates than
there is room for. Forward and choice as one captured graph, at a context of 512, one row.

    PYTHONPATH=. python docs/log/choice_steps.py OUT.json --random gemma-4-31b
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from drafters import registry
from specdec.cli.start import loaded_model
from specdec.core.config import ModelConfig
from specdec.core.provenance import gpus
from specdec.core.types import Sampling
from targets.cuda.ops import Rows
from targets.cuda.roofline import forward_samples
from targets.cuda.target import CudaTarget
from targets.sampling_params import set_row

CONTEXT = 512
WIDTHS = (1, 5, 8)
TURNS = 2
KINDS = {
    "greedy": Sampling(),
    "T 1": Sampling(1.0, seed=1),
    "T 1, top-k 64, top-p .95": Sampling(1.0, top_k=64, top_p=0.95, seed=1),
}


def heads(target: CudaTarget) -> Iterator[tuple[str, Sampling]]:
    """Each kind, with its head in place."""
    whole = target.weights
    narrow = whole.narrow_head
    assert narrow is not None
    yield from KINDS.items()
    target.weights = replace(whole, narrow_head=None)
    yield "greedy, a whole head", KINDS["greedy"]
    vague = replace(narrow, error=narrow.error * 1e6)
    target.weights = replace(whole, narrow_head=vague)
    yield "greedy, every step overflows", KINDS["greedy"]
    target.weights = whole


@torch.inference_mode()
def step_ms(target: CudaTarget, width: int, sampling: Sampling) -> float:
    def whole(*values):
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    set_row(target.sampling_params, 0, sampling, 16)
    rows = Rows(whole([*range(7, 7 + width)]), whole(CONTEXT), whole(0))

    def step():
        return target.step(rows, sampling.needs_sampler, False)

    return 1e3 * median(forward_samples(step, "cuda"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--random", default="gemma-4-31b")
    parser.add_argument("--dtype", default="fp8")
    options = parser.parse_args()
    config = ModelConfig(backend="cuda", dtype=options.dtype, slots=1, max_len=2 * CONTEXT)
    plain = registry.resolved(registry.config_type()(drafter="none", k=0), config, random=True)
    target = loaded_model(config, plain, random=options.random).target
    assert isinstance(target, CudaTarget)
    found: dict[str, list[float]] = {}
    for _ in range(TURNS):
        for width in WIDTHS:
            for name, sampling in heads(target):
                found.setdefault(f"{name}, {width}", []).append(step_ms(target, width, sampling))
    about = {"gpus": gpus(), "asked": vars(options) | {"out": None}}
    options.out.write_text(json.dumps(about | {"ms": found}, indent=1) + "\n")
    print({name: [round(ms, 3) for ms in times] for name, times in found.items()})


if __name__ == "__main__":
    main()
