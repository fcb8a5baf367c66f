"""Rules on ids: what a request may ask of its text beside a grammar. Each is told the tokens that
were emitted, and clears bits of the masks of the positions that come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seqs
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specdec.core.constraint import WORD


class Rule(Protocol):
    def advance(self, tokens: Seqs[int]) -> None:
        """These were emitted."""
        ...

    def restrict(self, draft: Seqs[int], masks: np.ndarray) -> None:
        """Clear bits of masks [at least len(draft) + 1, words]: row j after draft[:j]."""
        ...


def clear(mask: np.ndarray, tokens: Iterable[int]) -> None:
    for token in tokens:
        mask[token // WORD] &= ~np.uint32(1 << token % WORD)


def only(tokens: Iterable[int], words: int) -> np.ndarray:
    """The mask that allows these alone."""
    mask = np.zeros(words, np.uint32)
    for token in tokens:
        mask[token // WORD] |= np.uint32(1 << token % WORD)
    return mask


class AllowedTokens:
    """Nothing but these ids, ever."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens = tuple(tokens)

    def advance(self, tokens: Seqs[int]) -> None:
        pass

    def restrict(self, draft: Seqs[int], masks: np.ndarray) -> None:
        masks[: len(draft) + 1] &= only(self._tokens, masks.shape[1])


class LeastTokens:
    """No stop id among the first `count` tokens."""

    def __init__(self, count: int, stop_ids: Iterable[int]) -> None:
        self._left, self._stops = count, tuple(stop_ids)

    def advance(self, tokens: Seqs[int]) -> None:
        self._left -= len(tokens)

    def restrict(self, draft: Seqs[int], masks: np.ndarray) -> None:
        for mask in masks[: max(0, min(self._left, len(draft) + 1))]:
            clear(mask, self._stops)


class BadWords:
    """None of these runs of tokens."""

    def __init__(self, words: Iterable[Seqs[int]]) -> None:
        self._words = [tuple(word) for word in words]
        self._longest = max(map(len, self._words), default=1) - 1
        self._tail: list[int] = []

    def advance(self, tokens: Seqs[int]) -> None:
        self._tail = self._last([*self._tail, *tokens])

    def restrict(self, draft: Seqs[int], masks: np.ndarray) -> None:
        text = [*self._tail, *draft]
        for j in range(len(draft) + 1):
            before = text[: len(self._tail) + j]
            clear(masks[j], (word[-1] for word in self._words if _ends(before, word[:-1])))

    def _last(self, tokens: list[int]) -> list[int]:
        return tokens[len(tokens) - self._longest :] if len(tokens) > self._longest else tokens


def _ends(text: list[int], tail: tuple[int, ...]) -> bool:
    return not tail or tuple(text[-len(tail) :]) == tail


@dataclass(frozen=True)
class ThinkingLimit:
    """How long a thought may be."""

    open_id: int
    """The token that begins one."""
    close_id: int
    tokens: int
    """Most tokens between the two."""
    inside: bool = False
    """Whether the prompt ends within a thought."""


class ThinkingBudget:
    """A thought that has had its tokens ends: the next token is the one that closes it."""

    def __init__(self, budget: ThinkingLimit) -> None:
        self._budget = budget
        self._used: int | None = 0 if budget.inside else None

    def advance(self, tokens: Seqs[int]) -> None:
        for token in tokens:
            self._used = self._after(self._used, token)

    def restrict(self, draft: Seqs[int], masks: np.ndarray) -> None:
        used = self._used
        for j, mask in enumerate(masks[: len(draft) + 1]):
            if used is not None and used >= self._budget.tokens:
                mask &= only((self._budget.close_id,), len(mask))
            if j < len(draft):
                used = self._after(used, draft[j])

    def _after(self, used: int | None, token: int) -> int | None:
        """Tokens of the open thought after `token`, None outside of any."""
        if token == self._budget.close_id:
            return None
        if used is not None:
            return used + 1
        return 0 if token == self._budget.open_id else None
