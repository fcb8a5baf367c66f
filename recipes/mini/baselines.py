"""Unigram and trigram token models: what the network has to beat on the same held-out text."""

import numpy as np

from training.heldout import Loss, summarise
from training.tokens import BOS

DISCOUNT = 0.75


class CountModel:
    """Interpolated absolute discounting over token n-grams up to order 3; exact counts."""

    def __init__(self, stream: np.ndarray, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        counts = np.bincount(stream, minlength=vocabulary).astype(np.float64)
        self.unigram = (counts + 1) / (counts.sum() + vocabulary)
        ids = stream.astype(np.int64)
        self._pairs = self._count(ids[:-1] * vocabulary + ids[1:])
        self._triples = self._count((ids[:-2] * vocabulary + ids[1:-1]) * vocabulary + ids[2:])

    def _count(self, keys: np.ndarray) -> tuple[np.ndarray, ...]:
        """(n-grams, their counts, contexts, tokens and distinct followers of each context)."""
        grams, counts = np.unique(keys, return_counts=True)
        contexts, first = np.unique(grams // self.vocabulary, return_index=True)
        followers = np.diff(np.append(first, len(grams)))
        return grams, counts, contexts, np.add.reduceat(counts, first), followers

    def _refine(self, table: tuple[np.ndarray, ...], keys: np.ndarray, lower: np.ndarray):
        """One order up: P(token | longer context) from P(token | shorter) = `lower` [N]."""
        grams, counts, contexts, totals, followers = table
        count = _look_up(grams, counts, keys)
        total = _look_up(contexts, totals, keys // self.vocabulary)
        spread = _look_up(contexts, followers, keys // self.vocabulary)
        seen = np.maximum(total, 1)
        refined = np.maximum(count - DISCOUNT, 0) / seen + DISCOUNT * spread / seen * lower
        return np.where(total > 0, refined, lower)

    def nats(self, ids: np.ndarray, order: int) -> np.ndarray:
        """-log P of each token of one document (preceded by two <bos>); order 1 or 3."""
        whole = np.concatenate([[BOS, BOS], ids]).astype(np.int64)
        a, b, c = whole[:-2], whole[1:-1], whole[2:]
        probability = self.unigram[c]
        if order == 3:
            probability = self._refine(self._pairs, b * self.vocabulary + c, probability)
            keys = (a * self.vocabulary + b) * self.vocabulary + c
            probability = self._refine(self._triples, keys, probability)
        return -np.log(probability)


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The values of the given keys among the sorted ones, 0 where absent."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)


def baseline_losses(
    stream: np.ndarray, documents: list[np.ndarray], characters: int, vocabulary: int
) -> dict[str, Loss]:
    """{"unigram": ..., "trigram": ...} on tokenised held-out documents."""
    model = CountModel(stream, vocabulary)
    losses = {}
    for name, order in (("unigram", 1), ("trigram", 3)):
        nats = np.concatenate([model.nats(ids, order) for ids in documents])
        losses[name] = summarise(nats, characters)
    return losses
