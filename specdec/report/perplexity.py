"""Perplexity of a text that the user names."""

from __future__ import annotations

import hashlib

import numpy as np

from specdec.evaluation import perplexity
from specdec.report.parts import Section
from specdec.report.subject import Subject

WINDOW = 1024
"""Tokens per window, BOS included, if the model's context holds so many."""


def measure(subject: Subject) -> Section:
    """The section. Raises UserError for an empty text."""
    model = subject.model
    text = subject.text or ""
    bos, *ids = model.tokenizer.encode(text)
    size = min(WINDOW, model.target.arch.max_position)
    score = model.backend.scorer(model.target)
    total = sum(1 for _ in perplexity.windows(ids, bos, size, size // 2))
    with subject.progress.counting("scoring the text", total) as counter:
        done = 0

        def counted(tokens: list[int]) -> np.ndarray:
            nonlocal done
            done += 1
            counter.update(done)
            return score(tokens)

        found = perplexity.measure(ids, bos, size, size // 2, counted)
    return {
        "tokens": found.tokens,
        "nll": found.nll,
        "perplexity": found.perplexity,
        "low": found.low,
        "high": found.high,
        "window": size,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
