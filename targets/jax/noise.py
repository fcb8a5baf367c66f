"""Philox-4x32-10, counter based: the target's noise is a function of (seed, position, token id).

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), the constants of Random123.
The same integers come out of the numpy twin in tests and of any CUDA implementation; block
`token // 4` of stream `position` holds the words of four neighbouring token ids.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from specdec.core.types import Array

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def _multiply_wide(a: Array, constant: int) -> tuple[Array, Array]:
    """High and low 32 bits of a * constant, from 16-bit halves (no 64-bit integers on TPU)."""
    low_c, high_c = jnp.uint32(constant & 0xFFFF), jnp.uint32(constant >> 16)
    low_a, high_a = a & jnp.uint32(0xFFFF), a >> 16
    low = low_a * low_c
    middle = high_a * low_c + (low >> 16)
    cross = low_a * high_c + (middle & jnp.uint32(0xFFFF))
    return high_a * high_c + (middle >> 16) + (cross >> 16), a * jnp.uint32(constant)


def philox(counter: tuple[Array, Array, Array, Array], key: tuple[Array, Array]) -> tuple:
    """Four uint32 words for each counter; all inputs uint32 and broadcastable."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply_wide(c0, MULTIPLIERS[0])
        high1, low1 = _multiply_wide(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + jnp.uint32(WEYL[0]), k1 + jnp.uint32(WEYL[1])
    return c0, c1, c2, c3


def uniform(seed: Array, position: Array, vocab: int) -> Array:
    """seed [..., 2] uint32, position [...] int32 -> [..., V] float32 in (0, 1), finest near 0."""
    token = jnp.arange(vocab, dtype=jnp.uint32)
    stream = jnp.broadcast_to(position[..., None].astype(jnp.uint32), (*position.shape, vocab))
    zero = jnp.zeros_like(stream)
    counter = (jnp.broadcast_to(token // 4, stream.shape), stream, zero, zero)
    # each id makes its block's four words and takes one: four in a row would be an axis of 4,
    # which a TPU pads to 128 and writes to memory
    first, second, third, fourth = philox(counter, (seed[..., None, 0], seed[..., None, 1]))
    odd = token % 2 == 1
    low, high = jnp.where(odd, second, first), jnp.where(odd, fourth, third)
    flat = jnp.where(token % 4 >= 2, high, low)
    # centred in its cell of 2^-32, so never 0; rounding to float32 may reach 1, so it is capped
    return jnp.minimum((flat.astype(jnp.float32) + 0.5) * jnp.float32(2**-32), 1 - 2**-24)


@partial(jax.jit, static_argnums=2, inline=True)  # traced once for each shape
def gumbel(seed: Array, position: Array, vocab: int) -> Array:
    """Standard Gumbel noise [..., V] float32: argmax(log p + gumbel) is a draw from p.

    Large noise decides draws, and it comes from the uniform's fine end: -log(-log(1 - u)).
    """
    return -jnp.log(-jnp.log1p(-uniform(seed, position, vocab)))
