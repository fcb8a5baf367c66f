"""GPU memory of a server with random weights, all that the driver counts: when it is ready, after a
prompt that fills most of a slot, and after that prompt again. Beside it what torch holds of it, and
the most that was in use there since the step before.

    PYTHONPATH=. python docs/log/memory.py OUT.json --model gemma-4-31b --dtype int4 --max-len 8192
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from drafters import registry
from specdec.assembly.engine import serving_engine
from specdec.assembly.model import random_model
from specdec.core.config import ModelConfig, PrefixConfig
from specdec.core.provenance import gpus
from specdec.core.types import Sequence
from targets.cuda.device import used_bytes

ANSWER = 64


def used() -> dict[str, float]:
    """GiB."""
    counts = {
        "used": used_bytes(),
        "torch": torch.cuda.memory_reserved(),
        "most in use": torch.cuda.max_memory_allocated(),
    }
    torch.cuda.reset_peak_memory_stats()
    return {name: round(count / 2**30, 2) for name, count in counts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="gemma-4-31b")
    parser.add_argument("--dtype", default="int4")
    parser.add_argument("--kv-dtype")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--max-len", type=int, default=8192)
    parser.add_argument("--no-prefix-cache", action="store_true")
    options = parser.parse_args()
    asked = {"dtype": options.dtype, "kv_dtype": options.kv_dtype, "max_len": options.max_len}
    config = ModelConfig(options.model, backend="cuda", slots=1, **asked)
    speculation = registry.resolved(
        registry.config_type()(drafter=options.drafter), config, random=True
    )
    model = random_model(options.model, config, speculation)
    found = {"gpus": gpus(), "asked": vars(options) | {"out": str(options.out)}, "loaded": used()}
    prefix = PrefixConfig(not options.no_prefix_cache)
    engine = serving_engine(model, speculation, 8, prefix)
    found["ready"] = used()
    prompt = [2 + i % 4000 for i in range(options.max_len - ANSWER - 8)]
    for name in ("after a long prompt", "after it again"):
        seq = Sequence([*prompt], max_tokens=ANSWER)
        engine.run_to_end([seq])
        found[name] = used()
    print(json.dumps(found))
    options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
