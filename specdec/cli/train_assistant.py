"""`specdec train-assistant`: an assistant from distilled answers."""

from __future__ import annotations

from pathlib import Path

from specdec.cli import topics, training
from specdec.cli.distil import require_training
from specdec.core.config import ModelConfig


def train_assistant(
    recipe: Path,
    /,
    *,
    data: list[Path],
    run: Path,
    model: topics.Model = ModelConfig(),  # noqa: B008
    data_parallel_size: int = 1,
    json: bool = False,
) -> None:
    """Train an assistant for the model that wrote the data. The same command continues.

    Parameters
    ----------
    recipe
        TOML: see configs/assistant-mini-cpu.toml.
    data
        The folder that `specdec distil` made; repeat it to train on several.
    run
        Folder for checkpoints, log.jsonl and curve.png.
    data_parallel_size
        Devices that share the rows of each batch; the target is on each of them.
    json
        End stdout with one JSON document.
    """
    require_training()
    from training.recipe import read_assistant_recipe

    options = None, data_parallel_size, json
    training.train("train-assistant", read_assistant_recipe(recipe), data, run, model, *options)
