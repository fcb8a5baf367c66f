"""A run's newest checkpoint as a head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from drafters.eagle3.spec import Head, HeadSpec
from specdec.core.errors import UserError
from training.distil import target_hash
from training.eagle3 import CONTRACT, initial_state
from training.manifest import recall
from training.pretrain import open_checkpoints, restore
from training.recipe import HeadShape, Rates, Recipe


def trained_head(run: Path, target: Path) -> tuple[Head, int, int]:
    """(head in float32, step, draft steps that it was trained for).

    Raises UserError where RUN is no such run, has no checkpoint, or is of another target.
    """
    contract = recall(
        run / CONTRACT,
        lambda problem: (
            f"{run} is no training run ({problem}): name a --run of `specdec train-eagle3`"
        ),
    )
    ids = np.load(run / "vocabulary.npy")
    if contract["data"]["target"] != target_hash(target):
        raise UserError(f"{run} trained a head for another model than {target.name}: say --model")
    spec, recipe = _spec(contract["spec"]), _recipe(contract["recipe"])
    manager: ocp.CheckpointManager = open_checkpoints(run)
    if manager.latest_step() is None:
        raise UserError(f"{run} has no checkpoint yet: train until the first one is saved")
    blank = np.zeros((spec.vocab, spec.hidden), np.float32), np.zeros(spec.hidden, np.float32)
    state = restore(manager, jax.eval_shape(lambda: initial_state(spec, recipe, *blank, ids)))
    weights = {name: np.asarray(value) for name, value in state.weights.items()}
    return Head(spec, weights, ids), int(state.step), recipe.unroll


def _spec(values: dict[str, Any]) -> HeadSpec:
    values["layers"] = tuple(values["layers"])
    return HeadSpec(**values)


def _recipe(values: dict[str, Any]) -> Recipe:
    head, rates = values.pop("head"), values.pop("rates")
    head["layers"] = tuple(head["layers"])
    return Recipe(**values, head=HeadShape(**head), rates=Rates(**rates))
