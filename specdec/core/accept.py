"""The accept rule: a draft token is kept while it equals what the target chose.

One expression for numpy and jax, for greedy and for sampling alike: the target's choice is made
with noise keyed on (seed, position), so equality is the whole test (design: arXiv 2408.07978
couples sampled drafts through the same noise). The captured cycle's is a kernel
(`targets/cuda/kernels/cycle.cu`).
"""

from __future__ import annotations

from specdec.core.types import Array


def accept(draft: Array, chosen: Array) -> Array:
    """draft [B, k], chosen [B, k + 1] -> accepted [B]: length of the equal prefix, 0 to k."""
    return (draft == chosen[:, : draft.shape[1]]).cumprod(1).sum(1)
