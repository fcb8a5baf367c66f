"""Rules on token ids, applied beside a grammar. Each follows the emitted tokens and clears bits in
the masks of the next positions. Arrays are created once, so a cycle costs a few passes over
them."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence as Seqs
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specdec.core.constraint import WORD


class Rule(Protocol):
    def advance(self, tokens: Seqs[int]) -> None:
        """Follow the emitted tokens."""
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
    """The mask that allows only these tokens."""
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
    """Only these ids are allowed."""

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
    """Forbids these sequences of tokens.

    The rule runs an Aho-Corasick automaton (1975) over all words without their last tokens. Its
    state is the longest such prefix that is a suffix of the text. A state bars the last tokens of
    all words of which the rest is a suffix of the text. A step's cost does not depend on the number
    of words; a state's mask is created when the text first reaches it.
    """

    KEPT = 64
    """Most masks of states that are kept, the most recently used."""

    def __init__(self, words: Iterable[Seqs[int]]) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._bars: list[list[int]] = [[]]
        self._shorter = [0]
        """By state, the longest shorter prefix that is a suffix of it (the failure link)."""
        for word in words:
            state = 0
            for token in word[:-1]:
                state = self._child(state, token)
            self._bars[state].append(word[-1])
        self._link()
        self._state = 0
        self._keep: OrderedDict[int, Mask] = OrderedDict()
        self._always: Mask | None = None
        """The mask without the words of one token, which every state bars."""

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
        """Set the failure links breadth first, so that shorter prefixes are linked before
        longer."""
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
        """The tokens that a state bars: last tokens of words of two or more tokens."""
        barred: list[int] = []
        while state:
            barred += self._bars[state]
            state = self._shorter[state]
        return barred


@dataclass(frozen=True)
class ThinkingLimit:
    """The limit of a thought's length."""

    open_id: int
    """The token that begins a thought; `close_id` ends it."""
    close_id: int
    tokens: int
    """Most tokens between the two."""
    inside: bool = False
    """Whether the prompt ends within a thought."""


class ThinkingBudget:
    """Ends a thought at its limit, by allowing only the closing token."""

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
