"""Teacher-forced scoring: the negative log-likelihood of each token of a window, in nats."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from specdec.core.types import Array
from targets.arch import Arch
from targets.jax.model import head, sequence_hidden
from targets.jax.params import Params
from targets.jax.placing import read
from targets.jax.target import JaxTarget

BLOCK = 128
"""Positions with logits in memory at once: each has 262,144 float32, too much for all of them."""


@partial(jax.jit, static_argnums=1)
def _window_nll(params: Params, arch: Arch, tokens: Array) -> Array:
    hidden = sequence_hidden(params, arch, tokens[None, :-1]).last[0]
    blocks = hidden.reshape(-1, BLOCK, hidden.shape[-1])
    following = tokens[1:].reshape(-1, BLOCK)

    def block_nll(block: tuple[Array, Array]) -> Array:
        states, ids = block
        log_p = jax.nn.log_softmax(head(params, arch, states), -1)
        return -jnp.take_along_axis(log_p, ids[:, None], -1)[:, 0]

    return jax.lax.map(block_nll, (blocks, following)).reshape(-1)


def window_nll(target: JaxTarget, tokens: list[int]) -> np.ndarray:
    """nll[i] of tokens[i + 1] given tokens[:i + 1], float32, length len(tokens) - 1.

    The window is padded to a multiple of 128 so that few lengths compile; causality keeps the
    padding out of every score.
    """
    scored = len(tokens) - 1
    padded = np.zeros(-(-scored // BLOCK) * BLOCK + 1, np.int32)
    padded[: len(tokens)] = tokens
    return read(_window_nll(target.params, target.plan.arch, jnp.asarray(padded)))[:scored]
