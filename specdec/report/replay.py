"""A drafter's acceptance on recorded answers: the engine's own loop and counts, without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seqs
from typing import Any

import numpy as np

from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.protocols import Drafter, OneByOne
from specdec.core.script import Line, Script, ScriptedDrafter, ScriptedTarget
from specdec.core.types import MAX_DRAFT, Array, Proposal, Sequence, Step
from specdec.evaluation.record import Recording
from specdec.evaluation.results import PromptOutcome

ROWS = 8
"""Answers that are replayed at the same time."""


class Blank(OneByOne):
    """`Target` and `Drafter` that compute nothing: every choice and every guess is token 0. A
    script puts the recorded tokens in place of both."""

    slots = ROWS
    max_draft = MAX_DRAFT

    def __init__(self, max_len: int) -> None:
        """max_len: tokens of the longest prompt with its answer."""
        self.max_len = self.prefill_chunk = max_len

    def prefill(self, seq: Sequence, start: int, stop: int, step: Step | None = None) -> Any:
        return Step(np.zeros((1, 1), np.int32))

    def verify(self, seqs: Seqs[Sequence], draft: Array) -> Step:
        return Step(np.zeros((len(seqs), draft.shape[1] + 1), np.int32))

    def propose(self, seqs: Seqs[Sequence], k: int) -> Proposal:
        return Proposal(np.zeros((len(seqs), k), np.int32))

    def observe(self, seqs: Seqs[Sequence], step: Step, accepted: Array) -> None:
        pass

    def reset(self, seq: Sequence) -> None:
        pass


def replayed(
    recordings: Seqs[Recording], k: int, make: Callable[[int], Drafter] | None
) -> list[PromptOutcome]:
    """The outcome of each recorded answer, had this drafter guessed k tokens a cycle.

    make: a drafter that reads the text, for k guesses; None for the recorded one, which has
    weights.
    """
    longest = max(len(one.question.ids) + len(one.answer) for one in recordings)
    blank = Blank(longest + 1)
    lines = {one.question.prompt.id: _line(one) for one in recordings}
    script = Script(lines, ROWS, blank.max_len)
    target = ScriptedTarget(blank, script)
    drafter = make(k) if make else ScriptedDrafter(blank, script)
    engine = Engine(target, drafter, host_cycle(target, drafter, k), max_waiting=len(recordings))
    seqs = [_sequence(one) for one in recordings]
    engine.run_to_end(seqs)
    return [_outcome(one, seq) for one, seq in zip(recordings, seqs, strict=True)]


def _line(one: Recording) -> Line:
    return Line(one.answer, np.array(one.right, np.int32))


def _sequence(one: Recording) -> Sequence:
    question = one.question
    return Sequence(list(question.ids), max_tokens=len(one.answer), request_id=question.prompt.id)


def _outcome(one: Recording, seq: Sequence) -> PromptOutcome:
    prompt = one.question.prompt
    tokens = tuple(seq.tokens[seq.prompt_len :])
    return PromptOutcome(
        prompt.id, prompt.category, seq.prompt_len, tokens, seq.finish, seq.acceptance
    )
