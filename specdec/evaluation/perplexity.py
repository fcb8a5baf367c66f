"""Perplexity by sliding windows: BOS in every window, each token scored once with left context.

The method of transformers' fixed-length guide and rvLLM's corrected harness, with the interval
that both leave out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from specdec.core.errors import UserError

Score = Callable[[list[int]], np.ndarray]
"""tokens -> nll [len - 1] in nats, nll[i] of tokens[i + 1] given everything before it."""


@dataclass(frozen=True)
class Window:
    """tokens: BOS and a slice of the text; the last `new` of them are scored."""

    tokens: list[int]
    new: int


@dataclass(frozen=True)
class Perplexity:
    """nll: mean nats per token; low, high: 95 % interval of the perplexity."""

    tokens: int
    windows: int
    nll: float
    low: float
    high: float

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.nll))


def windows(ids: list[int], bos: int, size: int, stride: int) -> Iterator[Window]:
    """Windows of at most `size` tokens, BOS included, that score each id exactly once."""
    if not 1 <= stride < size:
        raise UserError(f"stride must be 1 to window - 1 = {size - 1}, got {stride}")
    done = 0
    while done < len(ids):
        stop = min(len(ids), size - 1 if done == 0 else done + stride)
        start = max(0, stop - (size - 1))
        yield Window([bos, *ids[start:stop]], stop - done)
        done = stop


def measure(ids: list[int], bos: int, size: int, stride: int, score: Score) -> Perplexity:
    """Perplexity of ids (without BOS). Raises UserError on an empty text."""
    parts = [score(w.tokens)[-w.new :] for w in windows(ids, bos, size, stride)]
    if not parts:
        raise UserError("the text is empty: there is nothing to score")
    return summarise(parts)


def summarise(parts: list[np.ndarray], samples: int = 1000) -> Perplexity:
    """Mean and a bootstrap interval. Tokens of a text depend on each other, so blocks of 64
    neighbours are resampled, not tokens."""
    nll = np.concatenate(parts).astype(np.float64)
    blocks = [nll[i : i + 64] for i in range(0, len(nll), 64)]
    sums = np.array([b.sum() for b in blocks])
    counts = np.array([len(b) for b in blocks])
    draw = np.random.default_rng(0).integers(0, len(blocks), (samples, len(blocks)))
    means = sums[draw].sum(1) / counts[draw].sum(1)
    low, high = np.exp(np.quantile(means, [0.025, 0.975]))
    return Perplexity(len(nll), len(parts), float(nll.mean()), float(low), float(high))
