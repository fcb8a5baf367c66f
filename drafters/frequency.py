"""The commonest words of a vocabulary: what a drafter with a small head chooses from."""

from __future__ import annotations

import sysconfig
from collections.abc import Collection
from pathlib import Path

import numpy as np

from specdec.core.errors import UserError
from targets.tokenizer import Tokenizer


def draft_vocabulary(counts: np.ndarray, size: int, always: Collection[int]) -> np.ndarray:
    """The `size` commonest ids, ascending int64, those of `always` among them whatever their
    counts [vocab].

    Ties, and ids that never occurred, go to the lower id: tokenizers number the words that they
    learnt by how common those were.
    """
    assert len(always) <= size <= len(counts), (len(always), size, len(counts))
    rank = counts.astype(np.float64)
    rank[list(always)] = np.inf
    return np.sort(np.argsort(-rank, kind="stable")[:size]).astype(np.int64)


def counts_of(texts: list[str], tokenizer: Tokenizer, vocab: int) -> np.ndarray:
    """How often each id occurs [vocab] in these texts."""
    return np.bincount(tokenizer.encode_pieces(texts), minlength=vocab)[:vocab]


def texts_at_hand(path: str | None) -> list[str]:
    """The texts of a file of the user's; None: Python's own library, English prose and code that
    lies on every machine which runs specdec. Raises UserError."""
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        return [file.read_text(errors="replace") for file in sorted(root.glob("*.py"))]
    try:
        return Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, ValueError) as problem:
        raise UserError(f"cannot read {path} ({problem}): name a file of text, UTF-8") from None
