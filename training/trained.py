"""A run's newest checkpoint as a head, as a block drafter, or as an assistant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from drafters.assistant.spec import Assistant
from drafters.dflash.spec import BlockHead
from drafters.eagle3.spec import Head, HeadSpec
from specdec.core.errors import UserError
from targets.model_folder import read_arch
from targets.tokenizer import load_tokenizer
from training.distil import target_hash
from training.heads import AnySpec, Origin, head_of
from training.manifest import recall
from training.pretrain import open_checkpoints, restore
from training.recipe import (
    AssistantShape,
    BlockShape,
    HeadShape,
    Rates,
    Recipe,
    assistant_for,
    block_for,
)
from training.trainer import CONTRACT, TrainState, initial_state


def trained_head(run: Path, target: Path) -> tuple[Head, int, int]:
    """(head in float32, step, draft steps that it was trained for).

    Raises UserError where RUN is no such run, has no checkpoint, or is of another target.
    """
    contract, ids = _contract(run, target, "train-eagle3")
    spec, recipe = _spec(contract["spec"]), _recipe(contract["recipe"], _head_shape)
    state = _restored(run, spec, recipe, ids)
    return Head(spec, state.weights, ids), int(state.step), recipe.unroll


def trained_assistant(run: Path, target: Path) -> tuple[Assistant, int]:
    """(assistant in float32, step). Raises UserError as `trained_head` does."""
    contract, ids = _contract(run, target, "train-assistant")
    recipe = _recipe(contract["recipe"], lambda values: AssistantShape(**values))
    spec = assistant_for(read_arch(target), recipe.head)
    state = _restored(run, spec, recipe, ids)
    return Assistant(spec, state.weights), int(state.step)


def trained_block(run: Path, target: Path) -> tuple[BlockHead, int]:
    """(block drafter in float32, step). Raises UserError as `trained_head` does."""
    contract, ids = _contract(run, target, "train-dflash")
    recipe, arch = _recipe(contract["recipe"], _block_shape), read_arch(target)
    spec = block_for(arch, recipe.head, load_tokenizer(target, arch.vocab).stop_ids)
    state = _restored(run, spec, recipe, ids)
    own = ids if spec.draft_vocab < spec.vocab else None
    return BlockHead(spec, state.weights, own), int(state.step)


def _contract(run: Path, target: Path, command: str) -> tuple[dict[str, Any], np.ndarray]:
    """What RUN was signed with, and its draft vocabulary. Raises UserError."""
    contract = recall(
        run / CONTRACT,
        lambda problem: (
            f"{run} is no training run ({problem}): name a --run of `specdec {command}`"
        ),
    )
    ids = np.load(run / "vocabulary.npy")
    if contract["data"]["target"] != target_hash(target):
        raise UserError(f"{run} has a head for another model than {target.name}: set --model")
    keys = {"backbone": "train-assistant", "slots": "train-dflash"}
    made = next((keys[key] for key in keys if key in contract["spec"]), "train-eagle3")
    if made != command:
        raise UserError(f"{run} is a run of `specdec {made}`, not of {command}: export it as such")
    return contract, ids


def _restored(run: Path, spec: AnySpec, recipe: Recipe[Any], ids: np.ndarray) -> TrainState:
    """The newest checkpoint, weights as numpy arrays. Raises UserError where there is none."""
    manager: ocp.CheckpointManager = open_checkpoints(run)
    if manager.latest_step() is None:
        raise UserError(f"{run} has no checkpoint yet: train until the first one is saved")
    vocab, hidden = head_of(spec).table
    blank = Origin(np.zeros((vocab, hidden), np.float32), np.zeros(hidden, np.float32))
    state = restore(manager, jax.eval_shape(lambda: initial_state(spec, recipe, blank, ids)))
    return state._replace(weights={n: np.asarray(value) for n, value in state.weights.items()})


def _spec(values: dict[str, Any]) -> HeadSpec:
    values["layers"] = tuple(values["layers"])
    return HeadSpec(**values)


def _block_shape(values: dict[str, Any]) -> BlockShape:
    made: dict[str, Any] = values | {"taps": tuple(values["taps"])}
    return BlockShape(**made)


def _head_shape(values: dict[str, Any]) -> HeadShape:
    made: dict[str, Any] = values | {"layers": tuple(values["layers"])}
    return HeadShape(**made)


def _recipe(values: dict[str, Any], shape: Callable[[dict[str, Any]], Any]) -> Recipe[Any]:
    """shape: makes what stood under [head]."""
    head, rates = values.pop("head"), values.pop("rates")
    return Recipe(**values, head=shape(head), rates=Rates(**rates))
