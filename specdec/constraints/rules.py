"""Rules on ids, beside a grammar. Each follows the emitted tokens, and clears bits in the masks of
the next positions. Arrays are made once: a cycle costs a few passes over them."""

from __future__ import annotations

from collections import OrderedDict, deque
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


Mask = np.ndarray
"""uint32 [words]: bit t % 32 of word t // 32 is token t."""


FEW = 1024
"""Tokens up to which setting their bits is quicker than packing a byte for each token of the
vocabulary."""


def only(tokens: Iterable[int] | np.ndarray, words: int) -> Mask:
    """The mask that allows these alone."""
    tokens = np.fromiter(tokens, np.int64)
    if len(tokens) <= FEW:
        mask = np.zeros(words, np.uint32)
        np.bitwise_or.at(mask, tokens // WORD, np.uint32(1) << (tokens % WORD).astype(np.uint32))
        return mask
    bits = np.zeros(words * WORD, np.uint8)
    bits[tokens] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32, copy=False)


class _Made:
    """A mask of fixed tokens, made once the number of words is known."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens = np.fromiter(tokens, np.int64)
        self._mask: Mask | None = None

    def of(self, words: int) -> Mask:
        if self._mask is None:
            self._mask = only(self._tokens, words)
        return self._mask


class AllowedTokens:
    """Nothing but these ids, ever."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._allowed = _Made(tokens)

    def advance(self, tokens: Seqs[int]) -> None:
        pass

    def restrict(self, draft: Seqs[int], masks: np.ndarray) -> None:
        masks[: len(draft) + 1] &= self._allowed.of(masks.shape[1])


class LeastTokens:
    """No stop id among the first `count` tokens."""

    def __init__(self, count: int, stop_ids: Iterable[int]) -> None:
        self._left, self._stops = count, _Made(stop_ids)

    def advance(self, tokens: Seqs[int]) -> None:
        self._left -= len(tokens)

    def restrict(self, draft: Seqs[int], masks: np.ndarray) -> None:
        rows = max(0, min(self._left, len(draft) + 1))
        if rows:
            masks[:rows] &= ~self._stops.of(masks.shape[1])


class BadWords:
    """None of these runs of tokens.

    A position is a state of the automaton of all words without their last tokens (Aho & Corasick
    1975): the longest such beginning that the text ends with. What it bars are the last tokens of
    the words whose beginnings the text ends with. A step costs the same however many words there
    are; a state's mask is made when the text first comes to it.
    """

    KEPT = 64
    """States whose masks are kept."""

    def __init__(self, words: Iterable[Seqs[int]]) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._bars: list[list[int]] = [[]]
        self._shorter = [0]
        """By state, the longest shorter beginning that its text ends with too."""
        for word in words:
            state = 0
            for token in word[:-1]:
                state = self._child(state, token)
            self._bars[state].append(word[-1])
        self._link()
        self._state = 0
        self._keep: OrderedDict[int, Mask] = OrderedDict()
        self._always: Mask | None = None
        """All but the words of one token."""

    def advance(self, tokens: Seqs[int]) -> None:
        for token in tokens:
            self._state = self._after(self._state, token)

    def restrict(self, draft: Seqs[int], masks: np.ndarray) -> None:
        state = self._state
        for j in range(len(draft) + 1):
            masks[j] &= self._mask(state, masks.shape[1])
            if j < len(draft):
                state = self._after(state, draft[j])

    def _child(self, state: int, token: int) -> int:
        if token not in self._next[state]:
            self._next[state][token] = len(self._next)
            self._next.append({})
            self._bars.append([])
            self._shorter.append(0)
        return self._next[state][token]

    def _link(self) -> None:
        """Breadth first: shorter beginnings are linked before longer ones."""
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for token, child in self._next[state].items():
                self._shorter[child] = self._after(self._shorter[state], token)
                waiting.append(child)

    def _after(self, state: int, token: int) -> int:
        while state and token not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(token, 0)

    def _mask(self, state: int, words: int) -> Mask:
        if self._always is None:
            self._always = ~only(self._bars[0], words)
        if state not in self._keep:
            barred = self._barred(state)
            self._keep[state] = self._always & ~only(barred, words) if barred else self._always
        self._keep.move_to_end(state)
        while len(self._keep) > self.KEPT:
            self._keep.popitem(last=False)
        return self._keep[state]

    def _barred(self, state: int) -> list[int]:
        """Last tokens of words of two tokens or more."""
        barred: list[int] = []
        while state:
            barred += self._bars[state]
            state = self._shorter[state]
        return barred


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
        self._budget, self._close = budget, _Made((budget.close_id,))
        self._used: int | None = 0 if budget.inside else None

    def advance(self, tokens: Seqs[int]) -> None:
        for token in tokens:
            self._used = self._after(self._used, token)

    def restrict(self, draft: Seqs[int], masks: np.ndarray) -> None:
        used = self._used
        for j, mask in enumerate(masks[: len(draft) + 1]):
            if used is not None and used >= self._budget.tokens:
                mask &= self._close.of(len(mask))
            if j < len(draft):
                used = self._after(used, draft[j])

    def _after(self, used: int | None, token: int) -> int | None:
        """Tokens of the open thought after `token`, None outside of any."""
        if token == self._budget.close_id:
            return None
        if used is not None:
            return used + 1
        return 0 if token == self._budget.open_id else None
