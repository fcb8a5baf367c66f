"""`auto` where nothing that is guessed is ever right, by a drafter with weights, by lookup or in a
prediction, over plain decoding, in the captured loop of a card, or in JAX's there.

Prompts, answers and predictions are random words; every forward is at full cost, on random weights.

    PYTHONPATH=. python docs/log/useless.py OUT.json
    PYTHONPATH=. python docs/log/useless.py OUT.json --random gemma-4-e4b --target jax bfloat16
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from choosing import K  # noqa: E402
from choosing_card import CUDA, loaded  # noqa: E402
from texts import useless  # noqa: E402

from drafters import registry  # noqa: E402
from specdec.bench.script_file import Recorded, ScriptRow  # noqa: E402
from specdec.bench.scripted import ScriptPlan, timed_passes  # noqa: E402
from specdec.core.provenance import gpus  # noqa: E402

TEXTS = {1: 4, 8: 24, 32: 64, 64: 128}
"""By batch, how many are said."""


def plan_of(batch: int, name: str) -> ScriptPlan:
    rows = [
        ScriptRow(
            prompt=row["prompt"],
            answer=row["answer"],
            prediction=row["prediction"],
            recorded=Recorded(K, {name: np.zeros(len(row["answer"]), np.int32)}),
        )
        for row in useless(TEXTS[batch])
    ]
    return ScriptPlan(rows, None, (batch,), (K,), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--with", dest="name", default="assistant")
    parser.add_argument("--random", default="gemma-4-31b")
    parser.add_argument("--batches", default="1,8,32,64")
    parser.add_argument("--target", nargs=2, default=CUDA, metavar=("BACKEND", "DTYPE"))
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batches.split(",")]
    model, auto = loaded(options.name, options.random, max(batches), 256, options.target)
    rows = []
    for batch in batches:
        plan, plain = plan_of(batch, options.name), 0.0
        for speculation in (registry.plain(auto), auto):
            for point, timed in timed_passes(model, speculation, plan):
                speed = timed.tokens / timed.seconds
                plain = plain or speed
                row = {"batch": batch, "drafter": point.drafter, "predicted": point.predicted}
                rows.append(row | {"tokens_per_second": speed, "over_plain": speed / plain})
                print(rows[-1], flush=True)
                options.out.write_text(json.dumps({"gpus": gpus(), "k": K, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
