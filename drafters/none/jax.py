"""Plain decoding inside the traced loop."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from specdec.core.types import NO_GUESS, Array


@dataclass(frozen=True)
class TracedNone:
    """A `TextFunction` without guesses."""

    def propose(self, history: Array, length: Array, k: int) -> Array:
        return jnp.full((history.shape[0], k), NO_GUESS, jnp.int32)
