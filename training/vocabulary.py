"""The draft vocabulary: the ids that the target generates most, and every stop id."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from training.packing import PackedRows


def count_generated(rows: PackedRows, vocab: int) -> np.ndarray:
    """How often the target chose each id [vocab]."""
    return np.bincount(rows.tokens[rows.generated], minlength=vocab)


def draft_vocabulary(counts: np.ndarray, size: int, stop_ids: Collection[int]) -> np.ndarray:
    """The `size` commonest ids, ascending int64, `stop_ids` among them whatever their counts.

    Ties, and ids that never occurred, go to the lower id.
    """
    assert len(stop_ids) <= size <= len(counts), (len(stop_ids), size, len(counts))
    rank = counts.astype(np.float64)
    rank[list(stop_ids)] = np.inf
    return np.sort(np.argsort(-rank, kind="stable")[:size]).astype(np.int64)


def coverage(counts: np.ndarray, target_ids: np.ndarray) -> float:
    """Share of the generated tokens that the draft vocabulary has."""
    return float(counts[target_ids].sum() / max(counts.sum(), 1))
