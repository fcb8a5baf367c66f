"""Constrained text: which tokens a position may hold, and the guesses that follow from that alone.

A mask is a function of the ids before its position, the draft's included. The target chooses under
it, so constrained decoding with a drafter equals constrained plain decoding for the reason that
makes decoding lossless anyway: a guess is kept only where it is the target's own choice.
"""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from specdec.core.protocols import Proposer
from specdec.core.types import (
    NO_GUESS,
    Array,
    CycleChoice,
    ForcedPrefix,
    Guesser,
    Proposal,
    Sequence,
    Step,
)

EVERYTHING = np.uint32(0xFFFFFFFF)
WORD = 32
"""Tokens per mask word."""
KNOWN: tuple[Guesser, ...] = ("prediction", "constraint")
"""Sources of guesses other than the drafter."""
_THREADS = ThreadPoolExecutor(4, "specdec-masks")
"""Constraints leave Python's lock while they compute, so that rows don't wait for each other."""


class Unrestricted:
    """A `Constraint` that allows everything: what constrained programs are warmed up with."""

    failure: str | None = None
    ends_at: int | None = None

    def masks(self, seq: Sequence, draft: Seqs[int], out: Array) -> None:
        pass

    def forced(self, seq: Sequence) -> list[int]:
        return []

    def packed(self) -> dict[str, Any]:
        return {}


def mask_words(vocab: int) -> int:
    """uint32 words of one mask."""
    return -(-vocab // WORD)


def constrained(seqs: Seqs[Sequence]) -> bool:
    """Whether any of them is."""
    return any(seq.constraint is not None for seq in seqs)


def mask_rows(seqs: Seqs[Sequence], draft: Array, vocab: int) -> np.ndarray | None:
    """What each position of a verify may hold: uint32 [B, k + 1, mask_words(vocab)], bit t % 32 of
    word t // 32 for token t; None where no sequence is constrained. draft [B, k] int32."""
    if not constrained(seqs):
        return None
    masks = np.empty((len(seqs), np.shape(draft)[1] + 1, mask_words(vocab)), np.uint32)
    fill_masks(seqs, draft, vocab, masks)
    return masks


def fill_masks(seqs: Seqs[Sequence], draft: Array, vocab: int, out: np.ndarray) -> None:
    """`mask_rows` into memory that is there: out [at least B, k + 1, words] uint32."""
    draft, out[: len(seqs)] = np.asarray(draft), EVERYTHING

    def fill(b: int) -> None:
        constraint = seqs[b].constraint
        assert constraint is not None
        constraint.masks(seqs[b], _real(draft[b], vocab), out[b])

    rows = [b for b, seq in enumerate(seqs) if seq.constraint is not None]
    list((map if len(rows) == 1 else _THREADS.map)(fill, rows))


def _real(draft: Array, vocab: int) -> list[int]:
    """The guesses up to the first that is no token."""
    ids = draft.tolist()
    return ids[: next((j for j, t in enumerate(ids) if not 0 <= t < vocab), len(ids))]


def guided(seqs: Seqs[Sequence]) -> bool:
    """Whether the host takes part in the next cycle: a sequence is constrained, or its predicted
    text may go on."""

    def asks(seq: Sequence) -> bool:
        predicted = seq.prediction is not None and seq.prediction.promising(seq.tokens)
        return seq.constraint is not None or predicted

    return any(map(asks, seqs))


def takes_known(choice: CycleChoice, seqs: Seqs[Sequence]) -> bool:
    """Whether predictions come first in a device loop's next cycle."""
    return choice.takes_known and guided(seqs)


def forced_prefix_of(seqs: Seqs[Sequence], k: int) -> ForcedPrefix | None:
    """What is guessed without the drafter; None where there is nothing at all."""
    rows = np.full((len(seqs), k), NO_GUESS, np.int32)
    guessers: list[Guesser] = []
    for b, seq in enumerate(seqs):
        known, guesser = _forced_prefix(seq, k)
        rows[b, : len(known)] = known
        guessers.append(guesser)
    return ForcedPrefix(rows, tuple(guessers)) if (rows != NO_GUESS).any() else None


def known_by_source(seqs: Seqs[Sequence], k: int) -> dict[str, Array]:
    """`forced_prefix_of` [B, k] by their source; a row has those of one source."""
    forced_prefix = forced_prefix_of(seqs, k)
    if forced_prefix is None:
        return {}
    source = np.array(forced_prefix.source)[:, None]
    apart = {name: np.where(source == name, forced_prefix.rows, NO_GUESS) for name in KNOWN}
    return {name: rows for name, rows in apart.items() if (rows != NO_GUESS).any()}


def _forced_prefix(seq: Sequence, k: int) -> tuple[Seqs[int], Guesser]:
    """What was predicted, as long as the text follows it; else what its constraint leaves no choice
    about. Of that the bytes are known, and not always into which tokens the target cuts them."""
    predicted = _predicted(seq, k)
    if predicted or seq.constraint is None:
        return predicted, "prediction"
    return seq.constraint.forced(seq)[: seq.most_guesses(k)], "constraint"


def _predicted(seq: Sequence, k: int) -> Seqs[int]:
    if seq.prediction is None:
        return ()
    return seq.prediction.guess(seq.tokens, seq.most_guesses(k))


def put_forced_first(forced_prefix: Array, draft: Array) -> Array:
    """The rows of `forced_prefix_of` first [B, k]; the drafter's go on behind them where they agree
    with them, for they were made without. One expression for numpy, jax and torch."""
    given = forced_prefix != NO_GUESS
    agreed = (~given | (forced_prefix == draft)).all(1)[:, None]
    return forced_prefix * given + (draft * agreed + NO_GUESS * ~agreed) * ~given


class Plain:
    """Guesses nothing, for K = 0: plain decoding."""

    def propose(self, seqs: Seqs[Sequence], k: int) -> Proposal:
        return Proposal(np.empty((len(seqs), 0), np.int32))

    def observe(self, seqs: Seqs[Sequence], step: Step, accepted: Array) -> None:
        pass


def limited(seqs: Seqs[Sequence], draft: Array) -> Array:
    """A draft [B, k] with no more guesses in a row than its request allows."""
    k = np.shape(draft)[1]
    most = [seq.most_guesses(k) for seq in seqs]
    if all(count == k for count in most):
        return draft
    wanted = np.arange(k) < np.array(most)[:, None]
    return np.where(wanted, np.asarray(draft), NO_GUESS).astype(np.int32)


class GuidedDrafter:
    """A drafter with predictions and forced tokens in front of its own guesses, limited to as many
    as each request allows. Both are cut to the columns of the drafter's own proposal."""

    def __init__(self, drafter: Proposer[Seqs[Sequence]]) -> None:
        self._drafter = drafter
        self.forced_prefix: ForcedPrefix | None = None
        """What came first in the last draft."""

    def propose(self, seqs: Seqs[Sequence], k: int) -> Proposal:
        own = self._drafter.propose(seqs, k)
        draft = limited(seqs, own.tokens)
        self.forced_prefix = forced_prefix_of(seqs, np.shape(draft)[1])
        if self.forced_prefix is not None:
            draft = put_forced_first(self.forced_prefix.rows, np.asarray(draft))
        return replace(own, tokens=draft)

    def observe(self, seqs: Seqs[Sequence], step: Step, accepted: Array) -> None:
        self._drafter.observe(seqs, step, accepted)
