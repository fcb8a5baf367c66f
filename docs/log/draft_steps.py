"""What a draft step takes beside a model on this card, its rows greedy or sampled: the time of a
captured draft of eight steps less that of one of two, by six.

    PYTHONPATH=. python docs/log/draft_steps.py OUT.json --random gemma-4-31b --drafter assistant
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch

from drafters import registry
from specdec.assembly.model import Model
from specdec.cli.start import loaded_model
from specdec.core.config import ModelConfig
from specdec.core.provenance import gpus
from specdec.core.types import NO_GUESS, Sampling
from targets.cuda.device_drafter import CapturedBatch
from targets.cuda.ops import Rows
from targets.cuda.roofline import forward_samples
from targets.sampling_params import set_row

CONTEXT = 512
LONG = 8
SHORT = 2
KINDS = {
    "greedy": Sampling(),
    "top-p .95": Sampling(0.8, top_p=0.95, seed=1),
    "top-k 64, top-p .95": Sampling(1.0, top_k=64, top_p=0.95, seed=1),
}


def step_ms(model: Model, drafter: str) -> dict[str, float]:
    """By how a row is sampled; one row."""
    placed, target = model.drafters[drafter], model.target
    on_device, found = placed.on_device(placed.make(LONG)), {}
    for name, sampling in KINDS.items():
        set_row(target.sampling_params, 0, sampling, 16)
        long, short = (_draft_ms(on_device, k, sampling) for k in (LONG, SHORT))
        found[name] = (long - short) / (LONG - SHORT)
    return found


@torch.inference_mode()
def _draft_ms(drafter: Any, k: int, sampling: Sampling) -> float:
    def whole(*values):
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    rows = Rows(whole([7, *[NO_GUESS] * k]), whole(CONTEXT), whole(0))
    batch = CapturedBatch(rows, sampling.needs_sampler, False)
    return 1e3 * median(forward_samples(lambda: drafter.propose(batch, k), "cuda"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--random", default="gemma-4-31b")
    parser.add_argument("--drafter", default="assistant")
    parser.add_argument("--draft-vocab", type=int)
    parser.add_argument("--dtype", default="fp8")
    options = parser.parse_args()
    config = ModelConfig(backend="cuda", dtype=options.dtype, slots=1, max_len=2 * CONTEXT)
    own = {} if options.draft_vocab is None else {"draft_vocab": options.draft_vocab}
    asked = registry.config_type()(drafter=options.drafter, k=LONG, **own)
    speculation = registry.resolved(asked, config, random=True)
    model = loaded_model(config, speculation, random=options.random)
    found = {"gpus": gpus(), "asked": vars(options) | {"out": None}}
    found["ms"] = step_ms(model, options.drafter)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print({name: round(ms, 4) for name, ms in found["ms"].items()})


if __name__ == "__main__":
    main()
