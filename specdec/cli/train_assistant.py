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
    data: training.Data,
    run: training.Run,
    model: topics.Model = ModelConfig(),  # noqa: B008
    data_parallel_size: training.Devices = 1,
    json: topics.Json = False,
) -> None:
    """Train an assistant for the model that wrote the data. The same command continues.

    Parameters
    ----------
    recipe
        TOML: see configs/assistant-mini-cpu.toml.
    """
    require_training()
    from training.recipe import read_assistant_recipe

    options = None, data_parallel_size, json
    training.train("train-assistant", read_assistant_recipe(recipe), data, run, model, *options)
