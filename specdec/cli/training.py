"""Shared by the training commands: trains a head by a recipe, with a progress bar and a record."""

from __future__ import annotations

import json as json_module
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from specdec.cli import topics
from specdec.cli.console import check_folder, command_record, console, print_json
from specdec.cli.progress import Bar, continues, working
from specdec.core.alone import hold_alone
from specdec.core.config import ModelConfig
from specdec.core.errors import UserError
from specdec.core.writing import write_whole, writing
from targets.backend import backend_of
from targets.mini import checkpoint_path

Out = Annotated[Path, Parameter(help="Folder for config.json and model.safetensors.")]
Target = Annotated[str, Parameter(help="The target that it was trained for.")]
Stored = Annotated[Literal["bfloat16", "float32"], Parameter(help="Of the weights.")]


@Parameter(name="*")
@dataclass(frozen=True)
class Training:
    """Options that all training commands have."""

    data: list[Path]
    """The folder that `specdec distil` made; repeat it to train on several."""
    run: Path
    """Folder for checkpoints, log.jsonl and curve.png."""
    data_parallel_size: int = 1
    """Devices that share the rows of each batch; the target is on each of them."""
    json: topics.Json = False


if TYPE_CHECKING:
    from training.recipe import Recipe
    from training.trainer import Trainer


def train(
    command: str,
    recipe: Recipe[Any],
    asked: Training,
    model: ModelConfig,
    feature_cache: Path | None = None,
) -> None:
    """Train to the recipe's end; an export follows. command: `train-` and what is trained. Raises
    UserError."""
    from training.assemble import TrainingRequest, make_trainer
    from training.curves import plot_run

    if (
        model.backend != "jax"
        or model.int8
        or model.dtype in ("fp8", "fp8-w8a8", "int4")
        or model.tp != 1
    ):
        raise UserError(
            f"{command} runs with JAX on unquantised weights: leave --backend, --int8, --tp and "
            "--dtype fp8 out"
        )
    run = asked.run
    check_folder(run, "--run")
    hold_alone(run, "--run")
    if feature_cache is not None:
        check_folder(feature_cache, "--feature-cache")
    backend_of(model).prepare(model)
    path = checkpoint_path(model.model)
    devices = asked.data_parallel_size
    inputs = recipe, asked.data, run, path, model.dtype, feature_cache, devices
    trainer, covered = make_trainer(TrainingRequest(*inputs), _Console())
    console.print(f"the draft vocabulary covers {covered:.2%} of the generated tokens")
    record = command_record(command, model=model, recipe=recipe) | {"coverage": covered}
    write_whole(run / "run.json", json_module.dumps(record, indent=1, default=str))
    found = _train(trainer, recipe)
    with writing(run / "curve.png", "the head is trained and saved"):
        plot_run(run)
    following = f"specdec {command.replace('train', 'export')}"
    console.print(f"wrote {run / 'log.jsonl'} and {run / 'curve.png'}; next: {following}")
    if asked.json:
        print_json(record | {"steps": recipe.steps, "heldout": found})


def say_exported(out: Path, step: int, json: bool, form: str | None = None) -> None:
    """Print the exported step, size and form (if there are several)."""
    size = (out / "model.safetensors").stat().st_size
    prefix = "" if form is None else f"{form}, "
    console.print(f"wrote step {step} to {out} ({prefix}{size / 2**20:.1f} MiB)")
    if json:
        own = {} if form is None else {"form": form}
        print_json({"step": step} | own | {"bytes": size, "out": str(out)})


class _Console:
    """`training.assemble.Watcher` on the terminal."""

    def note(self, line: str) -> None:
        console.print(line)

    def working(self, doing: str) -> AbstractContextManager[Any]:
        return working(console, doing)

    def bar(self, title: str, total: int, done: int) -> AbstractContextManager[Any]:
        return Bar(console, title, total, done)


def _train(trainer: Trainer, recipe: Recipe[Any]) -> dict[str, Any]:
    """Run to the end with a bar and a line per evaluation; the last evaluation."""
    last: dict[str, Any] = {}
    done = int(trainer.state.step)
    continues(console, "step", done, recipe.steps)
    with Bar(console, "training", recipe.steps, done) as bar:

        def tell(row: dict[str, Any]) -> None:
            if row["kind"] == "train":
                note = f"loss {row['loss']:.3f}, {row['tokens_per_second']:,} tokens/s"
                bar.update(row["step"], note)
            else:
                last.update(row)
                console.print(_line(row))

        trainer.train(recipe.steps, tell)
    return last


def _line(row: dict[str, Any]) -> str:
    """One evaluation, for people."""
    hits = " ".join(f"{share:.2f}" for share in row["accuracy"])
    return (
        f"step {row['step']}: held-out loss {row['loss']:.3f}, accuracy by draft step {hits}, "
        f"tau {row['tau_t0']:.2f} (T=0) {row['tau_t1']:.2f} (T=1) simulated, "
        f"{row['real_tau_t0']:.2f} and {row['real_tau_t1']:.2f} real"
    )
