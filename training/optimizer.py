"""Muon for the layers' matrices, AdamW for tables and norms; layer_scalar stays at 1."""

from dataclasses import dataclass
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers, muon

from specdec.core.toml import STRICT

ADAM_LIKE_RMS = 0.2  # size of Muon's update relative to the learning rate (arXiv 2502.16982)


@dataclass(frozen=True)
class OptimizerConfig:
    """learning_rate is Muon's peak; table_learning_rate AdamW's. Both follow the same schedule:
    linear warm-up, constant, then linear to `floor` over the last `decay_fraction` of the steps."""

    learning_rate: float
    table_learning_rate: float
    weight_decay: float
    warmup_steps: int
    decay_fraction: float
    floor: float
    clip: float
    __pydantic_config__ = STRICT


def schedule(peak: float, config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by step."""
    decay = max(1, int(steps * config.decay_fraction))
    stable = max(0, steps - config.warmup_steps - decay)
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, config.warmup_steps),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, peak * config.floor, decay),
        ],
        [config.warmup_steps, config.warmup_steps + stable],
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The update rule for a `targets.jax.params.Params` tree of float32 weights."""
    matrices = muon(
        schedule(config.learning_rate, config, steps),
        weight_decay=config.weight_decay,
        adam_b2=0.95,
        adam_learning_rate=schedule(config.table_learning_rate, config, steps),
        muon_weight_dimension_numbers=_matrix_axes,
        consistent_rms=ADAM_LIKE_RMS,
    )
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        matrices,
        optax.masked(optax.set_to_zero(), _is_layer_scalar),
    )


def _matrix_axes(params: Any) -> Any:
    """Layers are stacked [repeats, out, in]; whatever has another rank goes to AdamW."""
    return jax.tree.map(lambda p: MuonDimensionNumbers(2, 1) if p.ndim == 3 else None, params)


def _is_layer_scalar(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "layer_scalar" in jax.tree_util.keystr(path), params
    )
