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
    asked: training.Training,
    model: topics.Model = ModelConfig(),  # noqa: B008
) -> None:
    """Train an assistant for the model that wrote the data. The same command continues.

    Parameters
    ----------
    recipe
        TOML: see configs/assistant-mini-cpu.toml.
    """
    require_training()
    from training.recipe import read_assistant_recipe

    training.train("train-assistant", read_assistant_recipe(recipe), asked, model)
