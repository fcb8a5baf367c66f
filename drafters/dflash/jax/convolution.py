"""DFlash 2's convolutions around a sub-layer: each slot and the one before it, weighed by
coefficients that the sub-layer's input makes. Nothing comes from before a block.

Shape legend: B rows, U slots, H hidden, G groups of channels that share a coefficient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp

from drafters.dflash.spec import SIDES, TAPS
from specdec.core.types import Array
from targets.jax.layers import project


def convolved(
    w: dict[str, Any], conv: str, group: int, x: Array
) -> tuple[Array, Callable[[Array], Array]]:
    """A sub-layer's input x [B, U, H] as it is fed, and what is done with its output. group:
    channels of a coefficient; 0: there is no convolution."""
    if not group:
        return x, _unchanged
    coefficients = project(x, w[f"{conv}.kernel_projection"])
    coefficients = coefficients.reshape(*x.shape[:-1], SIDES, TAPS, -1)
    kernels = w[f"{conv}.base_kernel"] + jnp.repeat(coefficients, group, -1)
    before, after = kernels[..., 0, :, :], kernels[..., 1, :, :]
    return _convolve(before, x), partial(_convolve, after)


def _convolve(kernels: Array, x: Array) -> Array:
    """kernels [B, U, TAPS, H] over x [B, U, H]: a slot's own tap comes first."""
    earlier = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))
    return x * kernels[:, :, 0] + earlier * kernels[:, :, 1]


def _unchanged(x: Array) -> Array:
    return x
