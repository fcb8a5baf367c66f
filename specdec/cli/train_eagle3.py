"""`specdec train-eagle3`: a head from distilled answers."""

from __future__ import annotations

from pathlib import Path

from specdec.cli import topics, training
from specdec.cli.distil import require_training
from specdec.core.config import ModelConfig


def train_eagle3(
    recipe: Path,
    /,
    *,
    asked: training.Training,
    model: topics.Model = ModelConfig(),  # noqa: B008
    feature_cache: Path | None = None,
) -> None:
    """Train an EAGLE-3 head for the model that wrote the data. The same command continues.

    Parameters
    ----------
    recipe
        TOML: see configs/eagle3-*.toml.
    feature_cache
        Folder for the target's states of the whole data: filled first, if it isn't yet, and then
        read, so that no step runs the target. It pays where the data is seen several times (or by
        several runs: the recipe's head, rates and steps are free, its data and length are not)
        and the target costs more than the head. A token takes 4 KiB with mini in float32, 20 with
        E4B and 42 with 31B in bfloat16.
    """
    require_training()
    from training.recipe import read_recipe

    training.train("train-eagle3", read_recipe(recipe), asked, model, feature_cache)
