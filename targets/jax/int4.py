"""Rounding to int4 on load, by XLA: trying twenty scales on the host takes an hour for 31B."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from specdec.core.types import Array
from targets.stored import Groups, Stored, paired

GROUP = 32
"""Inputs that share a scale."""
SHRINKAGES = tuple(1 - step / 50 for step in range(21))
"""What is tried as a group's scale, in parts of that which fits its largest value."""


def quantise_int4(values: np.ndarray) -> Stored:
    """[..., out, in] -> -8 to 7, symmetric by groups, each with the bfloat16 scale of the least
    squared error; of an odd width the last group is filled up with zeros."""
    short = -values.shape[-1] % GROUP
    padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, short)]) if short else values
    codes, scale = _best(padded)
    kept = np.asarray(codes).reshape(padded.shape)[..., : values.shape[-1]]
    return Stored(paired(kept), None, Groups(np.asarray(scale), GROUP), "int4")


@jax.jit
def _best(values: Array) -> tuple[Array, Array]:
    parts = values.astype(jnp.float32).reshape(*values.shape[:-1], -1, GROUP)
    fits = jnp.maximum(jnp.abs(parts).max(-1), 1e-12) / 7

    def rounded(scale: Array) -> Array:
        return jnp.clip(jnp.rint(parts / scale[..., None]), -8, 7)

    def tried(best: tuple[Array, Array], part: Array) -> tuple[tuple[Array, Array], None]:
        scale = (fits * part).astype(jnp.bfloat16).astype(jnp.float32)
        error = jnp.square(rounded(scale) * scale[..., None] - parts).sum(-1)
        better = error < best[1]
        return (jnp.where(better, scale, best[0]), jnp.where(better, error, best[1])), None

    start = fits, jnp.full(fits.shape, jnp.inf)
    (scale, _), _ = jax.lax.scan(tried, start, jnp.asarray(SHRINKAGES, jnp.float32))
    return rounded(scale).astype(jnp.int8), scale.astype(jnp.bfloat16)
