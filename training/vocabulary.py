"""What of the generated tokens a draft vocabulary has."""

from __future__ import annotations

import numpy as np

from training.packing import PackedRows


def count_generated(rows: PackedRows, vocab: int) -> np.ndarray:
    """How often the target chose each id [vocab]."""
    return np.bincount(rows.tokens[rows.generated], minlength=vocab)


def coverage(counts: np.ndarray, target_ids: np.ndarray) -> float:
    """Share of the generated tokens that the draft vocabulary has."""
    return float(counts[target_ids].sum() / max(counts.sum(), 1))
