"""`specdec train-dflash`: a block drafter from distilled answers."""

from __future__ import annotations

from pathlib import Path

from specdec.cli import topics, training
from specdec.cli.distil import require_training
from specdec.core.config import ModelConfig


def train_dflash(
    recipe: Path,
    /,
    *,
    asked: training.Training,
    model: topics.Model = ModelConfig(),  # noqa: B008
    feature_cache: Path | None = None,
) -> None:
    """Train a block drafter for the model that wrote the data. The same command continues.

    Parameters
    ----------
    recipe
        TOML: see configs/dspark-mini-cpu.toml.
    feature_cache
        Folder for the target's states of the whole data, as of `train-eagle3`.
    """
    require_training()
    from training.recipe import read_block_recipe

    training.train("train-dflash", read_block_recipe(recipe), asked, model, feature_cache)
