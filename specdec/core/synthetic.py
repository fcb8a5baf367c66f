"""Synthetic acceptance: speed at a given tau, without weights that a drafter could agree with.

Everything is computed as always; only how many draft tokens a row keeps comes from a fixed table
instead of from comparing. What is emitted is then no longer the target's text: for speed only.
"""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from dataclasses import replace

import numpy as np

from specdec.core.errors import UserError
from specdec.core.protocols import Cycle
from specdec.core.types import SAT_OUT, Array, Round, Sequence

CYCLES = 1000
"""Rows of the table; then it starts again."""
GOLDEN = (5**0.5 - 1) / 2


def accepted_table(tau: float, k: int, slots: int, seed: int = 0) -> np.ndarray:
    """int32 [CYCLES, slots]: draft tokens kept, 0 to k, whose mean is tau - 1 in each column.

    Drawn as if each guess were right with the same probability, whatever came before. Quantiles
    by golden steps from a random start: short runs have the mean too, as independent draws do not.
    """
    if not 1 <= tau <= k + 1:
        raise UserError(f"--synthetic-tau must be 1 to K + 1 = {k + 1}, got {tau:g}")
    rate = _rate(tau - 1, k)
    start = np.random.default_rng(seed).random(slots)
    quantiles = (start + GOLDEN * np.arange(CYCLES)[:, None]) % 1
    # n are kept or more with probability rate ** n
    kept = (quantiles[..., None] < rate ** np.arange(1, k + 1)).sum(-1)
    return kept.astype(np.int32)


def synthetic_cycle(inner: Cycle, table: np.ndarray) -> Cycle:
    """`inner` on the host, keeping what the table says: entry (cycle, slot)."""
    turn = 0

    def run(seqs: Seqs[Sequence], single: bool) -> list[Round]:
        nonlocal turn
        rounds, slots = [], [seq.slot for seq in seqs]
        for done in inner(seqs, single):
            kept = table[turn % len(table), slots]
            rounds.append(replace(done, accepted=_unless_out(done.accepted, kept)))
            turn += 1
        return rounds

    return run


def _unless_out(accepted: Array, kept: np.ndarray) -> np.ndarray:
    return np.where(np.asarray(accepted) == SAT_OUT, SAT_OUT, kept)


def _rate(mean: float, k: int) -> float:
    """The acceptance of each guess at which `mean` of k are kept: sum of rate ** n, n = 1 .. k."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        enough = sum(middle**n for n in range(1, k + 1)) >= mean
        low, high = (low, middle) if enough else (middle, high)
    return high
