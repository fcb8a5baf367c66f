"""A distillation on the fake target that kills itself (SIGKILL): run by test_distil.py.

python -m tests.support.distil_worker OUT told|written N

It kills itself after N answers are done, or N records written; with N = 0 never.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from drafters.ngram.host import NgramDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.types import Sampling
from tests.support.fakes import FakeTarget
from training import distil as module
from training.distil import Source, distil

PROMPTS = [[2, *range(3, 4 + i % 5)] for i in range(22)]
SAMPLING = Sampling(seed=7)


def source(**changes) -> Source:
    values = {"max_tokens": 9, "max_len": 512, "stop_ids": (11,), "shard_rows": 4, "rows": 22}
    hashes = dict.fromkeys(("target", "tokenizer", "template", "prompts"), "x")
    used = {"backend": "jax", "dtype": "float32", "kv_dtype": "float32", "int8": False, "tp": 1}
    return Source(**{**hashes, "sampling": {"seed": 7}, **values, **used, **changes})


def run(out: Path, tell=lambda _: None, drafting: bool = True) -> int:
    target = FakeTarget(slots=3)
    drafter = NgramDrafter()
    engine = Engine(target, drafter, host_cycle(target, drafter, 3 if drafting else 0))
    return distil(engine, PROMPTS, SAMPLING, source(), out, tell)


def main() -> None:
    out, where, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    left = [count]

    def step(*_) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    if where == "written":
        whole = module._record
        module._record = lambda row, seq: (step(), whole(row, seq))[1]
        run(out)
    else:
        run(out, step)


if __name__ == "__main__":
    main()
