"""A small training of an assistant on a random target. Run as a program, it kills itself (SIGKILL):

python -m tests.training.assistant_worker RUN N: as soon as step N is done.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.support.eagle3_worker import RECIPE, answers, target
from tests.support.tiny import VOCAB
from training import trainer as training
from training.heads import head_of
from training.packing import pack
from training.recipe import AssistantShape, Recipe, assistant_for
from training.teacher import teach
from training.trainer import Trainer, contract_of, sign

SHAPE = AssistantShape(hidden=32, ffw=48, heads=4, sliding=1)
SMALL: Recipe[Any] = replace(RECIPE, head=SHAPE, unroll=1, evaluate_every=100, save_every=100)
OFTEN = replace(SMALL, save_every=4)
IDS = np.arange(VOCAB)
STEPS = 20


def taught(head, arch):
    def lesson(params, rows):
        return teach(params, arch, head.layers, jnp.asarray(IDS), (), rows, head.lenders)

    return lesson


def trainer(run: Path, recipe: Recipe[Any] = SMALL) -> Trainer:
    params, arch = target()
    spec = assistant_for(arch, recipe.head)
    run.mkdir(parents=True, exist_ok=True)
    rows, kept = pack(answers(30), recipe.length), pack(answers(6, 1), recipe.length)
    sign(run, contract_of(recipe, spec, {"target": "right"}, False, "float32"), IDS)
    return Trainer(recipe, spec, run, params, taught(head_of(spec), arch), rows, kept, IDS)


def main() -> None:
    last = int(sys.argv[2])

    def die(row: dict[str, Any]) -> None:
        if row["step"] == last:
            os.kill(os.getpid(), signal.SIGKILL)

    training.LOG_EVERY = 1
    trainer(Path(sys.argv[1]), OFTEN).train(STEPS, die)


if __name__ == "__main__":
    main()
