"""A cycle's outcome by row: the drafter of each guess, and how many guesses were accepted."""

from __future__ import annotations

import numpy as np

from specdec.core.types import NO_GUESS, CycleReport, Guesser, Proposal, Round


def sources_of(proposal: Proposal, row: int) -> list[str]:
    """The name of the drafter that made each guess of a row."""
    columns = proposal.tokens.shape[1]
    if proposal.source is None:
        return ["drafter"] * columns
    source = np.broadcast_to(np.asarray(proposal.source)[row], columns)
    return [proposal.names[number] for number in source]


def first_sources(proposal: Proposal) -> list[str]:
    """The name of the drafter that made each row's first guess."""
    source = proposal.source
    if source is None or not proposal.tokens.shape[1]:
        return ["drafter"] * len(proposal.tokens)
    first = np.asarray(source).reshape(len(source), -1)[:, 0]
    return [proposal.names[number] for number in first.tolist()]


def forced_guesses(done: Round) -> list[tuple[int, Guesser]]:
    """Number of guesses of each row's draft that come before the drafter's own, and their
    source."""
    prefix = done.forced_prefix
    if prefix is None:
        return [(0, "drafter")] * len(done.proposal.tokens)
    counts = (np.asarray(prefix.rows) >= 0).sum(1).tolist()
    return list(zip(counts, prefix.source, strict=True))


def report_of(
    done: Round, row: int, forced_guess: tuple[int, Guesser], emitted: int, seconds: float
) -> CycleReport:
    """The report of one row. forced_guess: the row's of `forced_guesses`. emitted: its emitted
    tokens. seconds: the time of the cycle."""
    draft = np.asarray(done.proposal.tokens)[row].tolist()
    draft = draft[: draft.index(NO_GUESS)] if NO_GUESS in draft else draft
    forced, source = forced_guess
    sources = sources_of(done.proposal, row)
    guessers = [source] * min(forced, len(draft)) + sources[forced : len(draft)]
    accepted = min(int(np.asarray(done.accepted)[row]), emitted)
    return CycleReport(tuple(draft), tuple(guessers), accepted, seconds)
