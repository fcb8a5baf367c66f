"""Philox-4x32-10 in torch: bit for bit the noise of `targets/jax/noise.py`, which describes it.

torch has no arithmetic on uint32, so words are int64 in [0, 2^32); a product of two wraps at 2^64
and keeps all its bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
MASK = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four words for each counter; all inputs int64 words and broadcastable."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        left, right = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        high0, high1 = (left >> 32) & MASK, (right >> 32) & MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, right & MASK, high0 ^ c3 ^ k1, left & MASK
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def uniform(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """seed [2] words, position [...] -> [..., V] float32 in (0, 1), finest near 0."""
    block = torch.arange(-(-vocab // 4), dtype=torch.int64, device=seed.device)
    zero = torch.zeros_like(block)
    words = philox((block, zero + position[..., None], zero, zero), (seed[0], seed[1]))
    flat = torch.stack(words, -1).flatten(-2)[..., :vocab]
    # centred in its cell of 2^-32, so never 0; rounding to float32 may reach 1, so it is capped
    return ((flat.float() + 0.5) * 2**-32).clamp(max=1 - 2**-24)


def gumbel(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise [V] float32."""
    return from_uniform(uniform(seed, position, vocab))


def from_uniform(u: Tensor) -> Tensor:
    """Gumbel noise, from the uniform's fine end: -log(-log(1 - u))."""
    return -torch.log(-torch.log1p(-u))
