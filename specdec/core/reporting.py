"""What a cycle's outcome says of one row: who guessed what, and what became of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence as Seqs

import numpy as np

from specdec.core.types import NO_GUESS, CycleReport, Guesser, Round


def whose_of(names: Mapping[int, str], by: Iterable[int], k: int) -> Seqs[Seqs[str]]:
    """`Round.whose` of rows of k guesses. by: the number of each row's drafter."""
    return [[names[int(number)]] * k for number in by]


def led_guesses(done: Round, row: int) -> tuple[int, Guesser]:
    """How many guesses of a row's draft come before the drafter's own, and whose they are."""
    if done.leading is None:
        return 0, "drafter"
    return int((np.asarray(done.leading.rows)[row] >= 0).sum()), done.leading.by[row]


def report_of(done: Round, row: int, emitted: int, seconds: float) -> CycleReport:
    """emitted: how many tokens of the row were. seconds: how long the cycle took."""
    draft = np.asarray(done.draft)[row].tolist()
    draft = draft[: draft.index(NO_GUESS)] if NO_GUESS in draft else draft
    led, leader = led_guesses(done, row)
    whose = ["drafter"] * len(draft) if done.whose is None else done.whose[row]
    guessers = [leader] * min(led, len(draft)) + list(whose[led : len(draft)])
    accepted = min(int(np.asarray(done.accepted)[row]), emitted)
    return CycleReport(tuple(draft), tuple(guessers), accepted, seconds)
