"""`specdec train-eagle3`: a head from distilled answers."""

from __future__ import annotations

import json as json_module
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.cli import topics
from specdec.cli.console import check_folder, command_record, console, print_json
from specdec.cli.distil import require_training
from specdec.cli.progress import Bar, continues, working
from specdec.core.config import ModelConfig
from specdec.core.errors import UserError
from specdec.core.writing import write_whole, writing
from targets.backend import backend_of
from targets.mini import checkpoint_path

if TYPE_CHECKING:
    from training.eagle3 import Trainer
    from training.recipe import Recipe


def train_eagle3(
    recipe: Path,
    /,
    *,
    data: list[Path],
    run: Path,
    model: topics.Model = ModelConfig(),  # noqa: B008
    feature_cache: Path | None = None,
    data_parallel_size: int = 1,
    json: bool = False,
) -> None:
    """Train an EAGLE-3 head for the model that wrote the data. The same command continues.

    Parameters
    ----------
    recipe
        TOML: see configs/eagle3-*.toml.
    data
        The folder that `specdec distil` made; repeat it to train on several.
    run
        Folder for checkpoints, log.jsonl and curve.png.
    feature_cache
        Folder for the target's states of the whole data: filled first, if it isn't yet, and then
        read, so that no step runs the target. It pays where the data is seen several times (or by
        several runs: the recipe's head, rates and steps are free, its data and length are not)
        and the target costs more than the head. A token takes 4 KiB with mini in float32, 20 with
        E4B and 42 with 31B in bfloat16.
    data_parallel_size
        Devices that share the rows of each batch; the target is on each of them.
    json
        End stdout with one JSON document.
    """
    require_training()
    from training.assemble import TrainingRequest, make_trainer
    from training.curves import plot_run
    from training.recipe import read_recipe

    chosen = read_recipe(recipe)
    if model.backend != "jax" or model.int8 or model.dtype in ("fp8", "fp8-w8a8") or model.tp != 1:
        raise UserError(
            "train-eagle3 runs with JAX on unquantised weights: leave --backend, "
            "--int8, --tp and --dtype fp8 out"
        )
    check_folder(run, "--run")
    if feature_cache is not None:
        check_folder(feature_cache, "--feature-cache")
    backend_of(model).prepare(model)
    path = checkpoint_path(model.model)
    given = chosen, data, run, path, model.dtype, feature_cache, data_parallel_size
    trainer, covered = make_trainer(TrainingRequest(*given), _Console())
    console.print(f"the draft vocabulary covers {covered:.2%} of the generated tokens")
    record = command_record("train-eagle3", model=model, recipe=chosen) | {"coverage": covered}
    write_whole(run / "run.json", json_module.dumps(record, indent=1, default=str))
    found = _train(trainer, chosen)
    with writing(run / "curve.png", "the head is trained and saved"):
        plot_run(run)
    console.print(f"wrote {run / 'log.jsonl'} and {run / 'curve.png'}; next: specdec export-eagle3")
    if json:
        print_json(record | {"steps": chosen.steps, "heldout": found})


class _Console:
    """`training.assemble.Watcher` on the terminal."""

    def note(self, line: str) -> None:
        console.print(line)

    def working(self, doing: str) -> AbstractContextManager[Any]:
        return working(console, doing)

    def bar(self, title: str, total: int, done: int) -> AbstractContextManager[Any]:
        return Bar(console, title, total, done)


def _train(trainer: Trainer, recipe: Recipe) -> dict[str, Any]:
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
