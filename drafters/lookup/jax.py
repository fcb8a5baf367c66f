"""Lookup inside the traced loop: the same guesses as `host.LookupTwin`, vectorised.

Comparing the last tokens with every window of the history takes a few passes over a few KB, which
is faster on the device than a transfer to the host and back.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from specdec.core.types import NO_GUESS, Array


@dataclass(frozen=True)
class TracedLookup:
    """A `TextFunction`: the guesses follow from the text alone."""

    shortest: int
    longest: int
    """Suffixes of so many tokens."""

    def propose(self, history: Array, length: Array, k: int) -> Array:
        """history [B, S] int32, of which the first length [B] are real -> draft [B, k]."""
        rows, position = jnp.arange(history.shape[0])[:, None], jnp.arange(history.shape[1])
        before = jnp.pad(history, ((0, 0), (self.longest, 0)), constant_values=NO_GUESS - 1)

        def goes_on(found: tuple[Array, Array, Array]) -> Array:
            n, matched, _ = found
            return (n <= self.longest) & matched.any()

        def longer(found: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            # the n tokens that end just before `position` are those that end the text
            n, matched, follow = found
            there = jax.lax.dynamic_slice_in_dim(before, self.longest - n, history.shape[1], 1)
            last = jnp.take_along_axis(history, jnp.maximum(length - n, 0)[:, None], 1)
            matched = matched & (there == last) & (position >= n) & (length[:, None] > n)
            latest = jnp.where(matched, position, 0).max(1)
            follow = jnp.where((n >= self.shortest) & (latest > 0), latest, follow)
            return n + 1, matched, follow

        matched = position < length[:, None]
        nowhere = jnp.zeros(history.shape[0], jnp.int32)
        _, _, follow = jax.lax.while_loop(goes_on, longer, (jnp.int32(1), matched, nowhere))
        period = jnp.maximum(length - follow, 1)
        source = follow[:, None] + jnp.arange(k) % period[:, None]
        copied = jnp.maximum(history[rows, source], NO_GUESS)  # pictures' places are below
        return jnp.where(follow[:, None] > 0, copied, NO_GUESS)
