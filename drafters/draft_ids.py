"""A draft vocabulary as files have it: `d2t`, the target's id of each draft id less that one."""

from __future__ import annotations

import numpy as np

from specdec.core.errors import UserError


def offsets(target_ids: np.ndarray) -> np.ndarray:
    """`d2t` as files have it: int64 [draft_vocab], target id less draft id."""
    return target_ids.astype(np.int64) - np.arange(len(target_ids))


def from_offsets(d2t: np.ndarray, vocab: int) -> np.ndarray:
    """The target ids that a file's `d2t` means. Raises UserError where they are not ascending ids
    of the target, as when a file holds them without having taken the draft id off."""
    target_ids = d2t.astype(np.int64) + np.arange(len(d2t))
    ascending = bool((np.diff(target_ids) > 0).all())
    if not ascending or target_ids[0] < 0 or target_ids[-1] >= vocab:
        raise UserError(
            f"d2t does not map draft ids to ascending target ids below {vocab}: it must hold "
            "target id minus draft id; export the head again"
        )
    return target_ids
