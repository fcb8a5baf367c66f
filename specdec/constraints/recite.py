"""Scores a given text: its tokens are forced and also guessed, so that each cycle reads K + 1 of
them, and their log-probabilities are those of decoding.
"""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from typing import Any

import numpy as np

from specdec.constraints.rules import only
from specdec.core.types import MAX_DRAFT, Sequence


class Recite:
    """`specdec.core.types.Constraint` that forces the sequence to become `text`; its prompt must be
    the beginning of `text`."""

    failure: str | None = None
    ends_at: int | None = None

    def __init__(self, text: Seqs[int]) -> None:
        self._text = list(text)

    def masks(self, seq: Sequence, draft: Seqs[int], out: np.ndarray) -> None:
        at = len(seq.tokens)
        for mask, token in zip(out, self._text[at : at + len(draft) + 1], strict=False):
            mask[:] = only((token,), len(mask))

    def forced(self, seq: Sequence) -> list[int]:
        at = len(seq.tokens)
        return self._text[at : at + MAX_DRAFT]

    def packed(self) -> dict[str, Any]:
        return {"recite": self._text}
