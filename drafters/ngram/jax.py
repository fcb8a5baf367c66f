"""Prompt lookup inside the traced loop: the same guesses as `host.py`, vectorised.

Comparing the last tokens with every window of the history is one pass over a few KB, which a
device does faster than a host can be asked.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from drafters.ngram.host import N_MAX, N_MIN
from specdec.core.types import NO_GUESS, Array


@dataclass(frozen=True)
class TracedNgram:
    """A `TextFunction`: the guesses follow from the text alone."""

    n_min: int = N_MIN
    n_max: int = N_MAX

    def propose(self, history: Array, length: Array, k: int) -> Array:
        """history [B, S] int32, of which the first length [B] are real -> draft [B, k]."""
        rows = jnp.arange(history.shape[0])[:, None]
        position = jnp.arange(history.shape[1])
        matched = jnp.ones(history.shape, bool)
        follow = jnp.zeros(history.shape[0], jnp.int32)
        for n in range(1, self.n_max + 1):
            # the n-gram that ends just before `position` equals the one that ends the text
            shifted = jnp.pad(history, ((0, 0), (n, 0)), constant_values=NO_GUESS - 1)
            last = jnp.take_along_axis(history, jnp.maximum(length - n, 0)[:, None], 1)
            matched = matched & (shifted[:, : history.shape[1]] == last)
            fits = (position >= n) & (position < length[:, None]) & (length[:, None] > n)
            latest = jnp.where(matched & fits, position, 0).max(1)
            if n >= self.n_min:
                follow = jnp.where(latest > 0, latest, follow)  # longer suffixes come later
        period = jnp.maximum(length - follow, 1)
        source = follow[:, None] + jnp.arange(k) % period[:, None]
        return jnp.where(follow[:, None] > 0, history[rows, source], NO_GUESS)
