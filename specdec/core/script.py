"""Scripted decoding: everything is computed as usual, but the tokens are replaced by a given
text's.

Speed depends on the text: on the matches that lookup finds in it, and on how often a drafter is
right. Texts of random weights contain no matches and agree with no drafter. So each choice of the
target is replaced by the script's token at that position. Guesses of drafters with weights are
replaced in the same way, to give a recorded acceptance. For speed tests only: the output is not the
target's text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence as Seqs
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specdec.core.errors import UserError
from specdec.core.protocols import Drafter, Target
from specdec.core.types import MAX_DRAFT, NO_GUESS, Array, Proposal, Sequence, Step

GOLDEN = (5**0.5 - 1) / 2
DIGITS = "0123456789abcdefghijklmnopqrstuv"
"""A digit for each number of right guesses, 0 to 31."""


@dataclass(frozen=True)
class Line:
    """One request's answer."""

    answer: Seqs[int]
    """Token ids; all of them are emitted."""
    right: Array | None = None
    """int32 [len(answer)]: how many guesses are right if a draft begins at that token. None: the
    drafter's own guesses are used."""


def _around(drafter: Any, wrap: Callable[[Any], Any]) -> Any:
    return wrap(drafter)


class Script:
    """The lines by request id, and by slot the scripted tokens at each position of its sequence."""

    def __init__(self, lines: Mapping[str, Line], slots: int, max_len: int) -> None:
        """Either all lines have a recorded acceptance, or none has."""
        shape = slots, max_len + MAX_DRAFT + 1
        self.lines = lines
        self.recorded = any(line.right is not None for line in lines.values())
        self.scripted = np.full(shape, NO_GUESS, np.int32)
        """[slots, positions]: the scripted token; NO_GUESS keeps the target's own choice."""
        self.right = np.zeros(shape, np.int32)
        """[slots, positions], see `Line`."""
        self.wrap_weighted: Callable[[Any, Callable[[Any], Any]], Any] = _around
        """(drafter, wrap) -> the device drafter, `wrap` around its part with weights."""
        self.version = 0
        """Incremented with each change, as devices keep copies."""

    def seat(self, seq: Sequence) -> None:
        """Set the scripted tokens of `seq.slot`, which `seq` owns from now on. A request without a
        line keeps the target's choices."""
        scripted, right = self.scripted[seq.slot], self.right[seq.slot]
        scripted[:], right[:] = NO_GUESS, 0
        line = self.lines.get(seq.request_id)
        if line is not None:
            spoken = slice(seq.prompt_len, seq.prompt_len + len(line.answer))
            scripted[spoken] = line.answer
            right[spoken] = 0 if line.right is None else line.right
        self.version += 1

    def coming(self, seq: Sequence, count: int) -> Array:
        """Its next tokens [count]."""
        return self.scripted[seq.slot, len(seq.tokens) : len(seq.tokens) + count]


def scripted_choice(scripted: Array, chosen: Array) -> Array:
    """The script's tokens, and the target's choice where the script has NO_GUESS; both arrays have
    one shape. The result depends on the choice, so that a compiler can't drop the forward. One
    expression for numpy, jax and torch, like the next."""
    return chosen + (scripted - chosen) * (scripted >= 0)


def recorded_draft(scripted: Array, right: Array, own: Array, offset: Array) -> Array:
    """A draft [B, k]: the first right [B] guesses are the script's tokens [B, k]; the others are
    the drafter's own, changed if they happen to be right. offset: 0 .. k - 1."""
    kept = offset < right[:, None]
    same = own == scripted
    missed = own * ~same + abs(scripted - 1) * same
    return scripted * kept + missed * ~kept


class ScriptedTarget:
    """A target with its choices replaced by a script's."""

    def __init__(self, target: Target, script: Script) -> None:
        self._target, self._script = target, script
        self.slots, self.max_len = target.slots, target.max_len
        self.max_draft, self.prefill_chunk = target.max_draft, target.prefill_chunk

    def prefill(self, seq: Sequence, start: int, stop: int) -> Step:
        if start == 0:
            self._script.seat(seq)
        return self._first(seq, stop, self._target.prefill(seq, start, stop))

    def prefill_parts(self, seq: Sequence, start: int, stop: int) -> Iterator[Step | None]:
        if start == 0:
            self._script.seat(seq)
        for step in self._target.prefill_parts(seq, start, stop):
            yield step and self._first(seq, stop, step)

    def together(self, lengths: Seqs[int]) -> list[int]:
        return self._target.together(lengths)

    def prefill_all(self, seqs: Seqs[Sequence]) -> list[Step]:
        for seq in seqs:
            self._script.seat(seq)
        steps = self._target.prefill_all(seqs)
        return [
            self._first(seq, seq.prompt_len, step) for seq, step in zip(seqs, steps, strict=True)
        ]

    def _first(self, seq: Sequence, stop: int, step: Step) -> Step:
        """The step of a chunk, with the script's choice behind a whole prompt."""
        if stop < seq.prompt_len:
            return step
        scripted = self._script.coming(seq, 1)[None]
        return replace(step, chosen=scripted_choice(scripted, np.asarray(step.chosen)))

    def verify(self, seqs: Seqs[Sequence], draft: Array) -> Step:
        step = self._target.verify(seqs, draft)
        scripted = np.stack([self._script.coming(seq, draft.shape[1] + 1) for seq in seqs])
        return replace(step, chosen=scripted_choice(scripted, np.asarray(step.chosen)))


class ScriptedDrafter:
    """A drafter that computes as usual, with its guesses replaced to be right as often as
    recorded."""

    def __init__(self, drafter: Drafter, script: Script) -> None:
        self._drafter, self._script = drafter, script
        self.reset, self.prefill = drafter.reset, drafter.prefill
        self.observe = drafter.observe

    def propose(self, seqs: Seqs[Sequence], k: int) -> Proposal:
        own = self._drafter.propose(seqs, k)
        scripted = np.stack([self._script.coming(seq, k) for seq in seqs])
        right = np.array([self._script.right[seq.slot, len(seq.tokens)] for seq in seqs])
        draft = recorded_draft(scripted, right, np.asarray(own.tokens), np.arange(k))
        return replace(own, tokens=draft.astype(np.int32))


def right_text(right: Seqs[int]) -> str:
    """`Line.right` in a script's form: a digit per token, base 32."""
    return "".join(DIGITS[count] for count in right)


def recorded_right(text: str) -> np.ndarray:
    """int32 [tokens] of a `right_text`. Raises UserError."""
    if strange := sorted(set(text) - set(DIGITS)):
        raise UserError(
            "what was recorded must be a digit per token of the answer, 0 to 9 and then a to v, "
            f"got {strange[0]!r}"
        )
    return np.array([DIGITS.index(digit) for digit in text], np.int32)


def drawn_right(acceptance: Seqs[float], count: int, seed: int) -> np.ndarray:
    """int32 [count]: random numbers of right guesses for drafts that begin at each of `count`
    tokens.
    acceptance: shares of cycles that keep at least 1, 2, ... guesses, as `eval-acceptance` reports
    by position. A token's number does not depend on K or on where earlier cycles began."""
    kept = np.asarray(acceptance, np.float64)
    if not len(kept) or not ((0 <= kept) & (kept <= 1)).all() or (np.diff(kept) > 0).any():
        raise UserError(
            "an acceptance must be shares of cycles that keep at least 1, 2, ... guesses, each 0 "
            f"to 1 and none above the one before, got {', '.join(f'{x:g}' for x in acceptance)}"
        )
    chance = np.random.default_rng(seed).random(count)
    return (chance[:, None] < kept).sum(1, dtype=np.int32)


def right_for_tau(tau: float, k: int, count: int, seed: int = 0) -> np.ndarray:
    """int32 [count]: the same for cycles that emit `tau` tokens on average, with one chance for
    every guess to be right. Raises UserError.

    Cycles of k guesses begin at only some of the tokens. Only these get numbers, by quantiles in
    golden ratio steps from a random start: unlike independent draws, even short runs have the mean.
    """
    if not 1 <= tau <= k + 1:
        raise UserError(f"--synthetic-tau must be 1 to K + 1 = {k + 1}, got {tau:g}")
    kept = _rate(tau - 1, k) ** np.arange(1, k + 1)
    right, quantile = np.zeros(count, np.int32), np.random.default_rng(seed).random()
    place = 1  # the first token is prefill's
    while place < count:
        right[place] = (quantile < kept).sum()
        quantile = (quantile + GOLDEN) % 1
        place += int(right[place]) + 1
    return right


def _rate(mean: float, k: int) -> float:
    """The acceptance of each guess at which `mean` of k are kept: sum of rate ** n, n = 1 .. k."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        enough = sum(middle**n for n in range(1, k + 1)) >= mean
        low, high = (low, middle) if enough else (middle, high)
    return high
