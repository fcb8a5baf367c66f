"""How many experts the rows of a random mixture of experts pick in common.

Rows of a real text pick some experts in common, so a verify reads fewer experts than its rows could
pick. Random words pick independently. If the embeddings of random words share a part, so do their
streams, layer after layer, and the router logits of two rows are as correlated as the streams: the
share of that part decides how often picks repeat. This module computes the number of experts for
it, by drawing rows of correlated normal logits.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from specdec.core.errors import UserError
from targets.arch import MoeSpec

ROWS = 5
"""Rows of the verify for which an overlap is defined: K = 4."""
DRAWN = 1 << 21
"""Logits to draw for a mean."""
HALVINGS = 12


@cache
def experts_picked(moe: MoeSpec, rows: int, correlation: float = 0.0) -> float:
    """Different experts that so many rows pick on average. correlation: of their router logits; 0
    of rows that pick independently and evenly."""
    if not correlation:
        return moe.experts * (1 - (1 - moe.top_k / moe.experts) ** rows)
    rng, draws = np.random.default_rng(0), max(16, DRAWN // (rows * moe.experts))
    shared = rng.standard_normal((draws, 1, moe.experts), np.float32)
    own = rng.standard_normal((draws, rows, moe.experts), np.float32)
    logits = correlation**0.5 * shared + (1 - correlation) ** 0.5 * own
    best = np.argpartition(-logits, moe.top_k, axis=-1)[..., : moe.top_k]
    picked = np.zeros((draws, moe.experts), bool)
    np.put_along_axis(picked, best.reshape(draws, -1), True, axis=1)
    return float(picked.sum(1).mean())


def correlation_for(overlap: float, moe: MoeSpec) -> float:
    """The correlation at which that share of the picks of ROWS rows repeats another row's. Raises
    UserError for less than chance alone makes, and for more than there can be."""

    def repeated(correlation: float) -> float:
        return 1 - experts_picked(moe, ROWS, correlation) / (ROWS * moe.top_k)

    least, most = repeated(0.0), 1 - 1 / ROWS
    if not least <= overlap < most:
        raise UserError(
            f"--routing-overlap must be {least:.2f} (rows that pick by chance) to below {most:.2f} "
            f"(all of {ROWS} rows alike), got {overlap:g}"
        )
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if repeated(middle) < overlap else (low, middle)
    return low
