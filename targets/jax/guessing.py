"""A drafter's guess out of its own logits, as the target would choose: by the request's rules, and
with the target's noise at the guess's position (Gumbel coupling, arXiv 2408.07978)."""

from __future__ import annotations

import jax.numpy as jnp

from specdec.core.types import NO_GUESS, Array
from targets.jax import sampling
from targets.sampling_params import Rules


def guess(
    logits: Array, ids: Array | None, rules: Rules, place: Array, going: Array, needs_sampler: bool
) -> Array:
    """logits [B, D] float32 of the words ids [D], or [B, D] where rows score different ones; None:
    of the whole vocabulary. -> the guess for position place [B] of each text: [B] int32.

    NO_GUESS where a row is not `going` [B], or all of these words are barred. An id outside the
    vocabulary counts as barred. needs_sampler False: every guess is a bare argmax.
    """
    vocab = rules.bias.shape[1]
    if ids is None:
        bias = rules.bias
    elif ids.ndim == 1:
        bias = rules.bias[:, ids]
    else:
        bias = jnp.take_along_axis(rules.bias, ids, 1, mode="fill", fill_value=-jnp.inf)
    possible = (logits + bias).max(-1) > -jnp.inf
    if needs_sampler:
        known = logits if ids is None else _spread(logits, ids, vocab)
        start = (place - 1).astype(jnp.int32)
        chosen = sampling.choose(known[:, None], *rules, start)[:, 0]
    else:
        best = jnp.argmax(logits + bias, -1)
        chosen = best if ids is None else _word(ids, best)
    return jnp.where(going & possible, chosen, NO_GUESS).astype(jnp.int32)


def _spread(logits: Array, ids: Array, vocab: int) -> Array:
    """[B, V]: -inf for words that are not scored."""
    row = jnp.arange(logits.shape[0])[:, None]
    known = jnp.full((logits.shape[0], vocab), -jnp.inf)
    return known.at[row, ids].set(logits, mode="drop")


def _word(ids: Array, best: Array) -> Array:
    return ids[best] if ids.ndim == 1 else jnp.take_along_axis(ids, best[:, None], 1)[:, 0]
