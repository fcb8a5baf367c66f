"""Train a head on what its target wrote, the target itself teaching in each step.

RUN receives orbax checkpoints, log.jsonl, curve.png, vocabulary.npy and contract.json; the same
command continues where the last one stopped, with the same bits as if it had not stopped.
Weights are float32, arithmetic is the teacher's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specdec.core.errors import UserError
from specdec.core.writing import write_whole, writing
from targets.jax.params import Params
from training.data_parallel import DataParallel
from training.heads import AnySpec, Origin, Weights, head_of, origin_of
from training.manifest import agree
from training.pace import Pace
from training.packing import PackedRows, rows_of_step
from training.pretrain import open_checkpoints, restore
from training.recipe import Recipe, make_optimizer
from training.teacher import TeacherOutput
from training.unroll import judge, loss_of, measures, simulated

ADDED = {"silu": True, "own_head": False, "window": 0, "anchor_predicts": False}
"""Fields of specs and recipes that were added after 0.1.0, and the value that stands for what was
before."""
CONTRACT = "contract.json"
LOG_EVERY = 10  # steps
HELDOUT_BATCHES = 8
"""Most batches that one evaluation takes."""
Teach = Callable[[Params, PackedRows], TeacherOutput]
"""(target's parameters, packed rows) -> Lesson; pure."""


class TrainState(NamedTuple):
    """What a checkpoint holds; `step` is also the position in the data."""

    step: Any
    weights: Weights
    optimizer: Any


def initial_state(
    spec: AnySpec, recipe: Recipe[Any], origin: Origin, target_ids: np.ndarray
) -> TrainState:
    """Fresh weights."""
    random, head = np.random.default_rng(recipe.seed), head_of(spec)
    weights: Weights = {}
    for name, shape in head.shapes.items():
        noise = random.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
        weights[name] = jnp.ones(shape, jnp.float32) if len(shape) == 1 else jnp.asarray(noise)
    start = head.start(origin, target_ids)
    # copies: a step gives its weights away, and the target's are not its own
    weights |= {name: jnp.array(value, jnp.float32) for name, value in start.items()}
    optimizer = make_optimizer(recipe)
    return TrainState(jnp.zeros((), jnp.int32), weights, optimizer.init(weights))


def make_step(spec: AnySpec, recipe: Recipe[Any], teach: Teach, target_ids: Any) -> Any:
    """A compiled (state, target's parameters, rows) -> (state, measures)."""
    optimizer = make_optimizer(recipe)

    def loss(weights: Weights, params: Params, rows: PackedRows, lesson: TeacherOutput) -> Any:
        judged = _judge(spec, recipe, weights, params, rows, lesson, target_ids)
        return loss_of(judged, recipe.decay, recipe.loss), measures(judged)

    def step(
        state: TrainState, params: Params, rows: PackedRows
    ) -> tuple[TrainState, dict[str, Any]]:
        lesson = teach(params, rows)
        both = jax.value_and_grad(loss, has_aux=True)(state.weights, params, rows, lesson)
        (value, found), gradient = both
        updates, inner = optimizer.update(gradient, state.optimizer, state.weights)
        weights: Any = optax.apply_updates(state.weights, updates)
        found |= {"loss": value, "gradient_norm": optax.tree.norm(gradient)}
        return TrainState(state.step + 1, weights, inner), found

    return jax.jit(step, donate_argnums=0)


def make_evaluation(spec: AnySpec, recipe: Recipe[Any], teach: Teach, target_ids: Any) -> Any:
    """A compiled (weights, target's parameters, rows, number of the batch) -> measures."""

    def evaluate(weights: Weights, params: Params, rows: PackedRows, number: Any) -> dict[str, Any]:
        lesson = teach(params, rows)
        judged = _judge(spec, recipe, weights, params, rows, lesson, target_ids)
        found = measures(judged) | {"loss": loss_of(judged, recipe.decay, recipe.loss)}
        return found | simulated(judged, jax.random.fold_in(jax.random.key(recipe.seed), number))

    return jax.jit(evaluate)


def _judge(
    spec: AnySpec,
    recipe: Recipe[Any],
    weights: Weights,
    params: Params,
    rows: PackedRows,
    lesson: TeacherOutput,
    target_ids: Any,
) -> Any:
    table = params.top["embed_tokens"]
    cast = jax.tree.map(lambda leaf: leaf.astype(table.dtype), weights)
    return judge(cast, spec, table, target_ids, rows, lesson, recipe.unroll)


class Trainer:
    """The loop: owns the state, the log and the checkpoints of one RUN folder."""

    def __init__(
        self,
        recipe: Recipe[Any],
        spec: AnySpec,
        run: Path,
        params: Params,
        teach: Teach,
        rows: PackedRows,
        heldout: PackedRows,
        target_ids: np.ndarray,
        live: Callable[[Weights], dict[str, Any]] | None = None,
        devices: int = 1,
    ) -> None:
        """live: what to measure besides, at each evaluation (real_acceptance.py). devices: how many
        share a batch's rows. Raises UserError where they can't."""
        self.live, self._spread = live, DataParallel(devices, recipe.batch)
        self.recipe, self.run, self.params = recipe, run, self._spread.copies(params)
        self.rows, self.heldout = rows, heldout
        self.manager = open_checkpoints(run)
        fresh = initial_state(spec, recipe, origin_of(params), target_ids)
        self.state = self._spread.copies(restore(self.manager, fresh))
        ids = jnp.asarray(target_ids, jnp.int32)
        self._step = make_step(spec, recipe, teach, ids)
        self._evaluation = make_evaluation(spec, recipe, teach, ids)
        _forget_after(run / "log.jsonl", int(self.state.step))

    def train(self, until: int, tell: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
        """Train up to step `until` and save. The callback gets each row of the log."""
        step = int(self.state.step)
        pace = Pace(step)
        while step < until:
            batch = rows_of_step(self.rows, self.recipe.seed, step, self.recipe.batch)
            batch = self._spread.shares(batch)
            self.state, found = self._step(self.state, self.params, batch)
            step += 1
            if step % LOG_EVERY == 0 or step == until:
                row = {"step": step, "kind": "train", **_plain(found)}  # waits for the device
                row["tokens_per_second"] = round(pace.tokens_per_second(step, batch.tokens.size))
                pace.mark(step)
                self._log(row, tell)
            if step % self.recipe.evaluate_every == 0 or step == until:
                self._log({"step": step, "kind": "heldout", **self.evaluate()}, tell)
                pace.mark(step)
            if step % self.recipe.save_every == 0 or step == until:
                self._save(step)
                pace.mark(step)

    def evaluate(self) -> dict[str, Any]:
        """Measures of the held-out rows, means over up to HELDOUT_BATCHES batches; `live`'s."""
        batches = min(HELDOUT_BATCHES, -(-len(self.heldout.tokens) // self.recipe.batch))
        found = []
        for number in range(batches):
            batch = rows_of_step(self.heldout, 0, number, self.recipe.batch)
            batch = self._spread.shares(batch)
            found.append(self._evaluation(self.state.weights, self.params, batch, number))
        means = jax.tree.map(lambda *parts: np.mean(parts, 0), *found)
        return _plain(means | (self.live(self.state.weights) if self.live else {}))

    def _save(self, step: int) -> None:
        if self.manager.latest_step() == step:
            return
        import orbax.checkpoint as ocp

        try:
            self.manager.save(step, args=ocp.args.StandardSave(self.state))
            self.manager.wait_until_finished()
        except (OSError, ValueError) as problem:  # tensorstore raises ValueError for a full disk
            raise UserError(
                f"cannot save step {step} in {self.run}: {problem}; the checkpoint of step "
                f"{self.manager.latest_step()} stands: make room and repeat the command"
            ) from None

    def _log(self, row: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
        with writing(file := self.run / "log.jsonl", "the checkpoints before stand"):
            with file.open("a") as log:
                log.write(json.dumps(row) + "\n")
        tell(row)


def sign(run: Path, contract: dict[str, Any], target_ids: np.ndarray) -> None:
    """Write the contract to RUN, or compare it with the one there. Raises UserError that names the
    differences."""
    run.mkdir(parents=True, exist_ok=True)
    file = run / CONTRACT
    if not file.exists():  # before the contract: a run with a contract has both files
        with writing(run / "vocabulary.npy"):
            np.save(run / "vocabulary.npy", target_ids)
    agree(
        file,
        contract,
        lambda names: (
            f"{run} is a run with other {names}: repeat its options to continue it, or "
            "name another --run"
        ),
        added=("dtype",),
    )


def contract_of(
    recipe: Recipe[Any], spec: AnySpec, data: dict[str, Any], cached: bool, dtype: str
) -> dict[str, Any]:
    """All that determines a run's results, bit by bit, on a number of devices. data: the distilled
    answers' manifest; cached: the teacher's states were computed before the run, in a program of
    their own; dtype: the teacher's."""
    made = {"recipe": _as_of_old(asdict(recipe)), "spec": _as_of_old(asdict(spec)), "data": data}
    return made | {"feature_cache": cached, "dtype": dtype}


def _as_of_old(part: dict[str, Any]) -> dict[str, Any]:
    """Without the fields of ADDED: contracts of earlier versions lack them."""
    kept = {name: value for name, value in part.items() if ADDED.get(name, ...) != value}
    return {
        name: _as_of_old(value) if isinstance(value, dict) else value
        for name, value in kept.items()
    }


def _forget_after(log: Path, step: int) -> None:
    """Drop the log's rows of steps after the restored one, and an incomplete last line."""
    if not log.exists():
        return
    lines = log.read_text().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    kept = [line for line in whole if json.loads(line)["step"] <= step]
    if kept != lines:
        write_whole(log, "".join(kept))


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    """Arrays to numbers and lists, for JSON."""
    return {name: np.asarray(value).tolist() for name, value in found.items()}
