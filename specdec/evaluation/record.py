"""How far a drafter's guesses hold from every token of an answer on: what `bench --script` replays.

A request decodes a token per cycle, whatever was guessed, and each cycle's draft is compared with
the answer when that is whole. So the record says how a cycle would fare wherever it began. Drafters
with weights follow from the text and the target's states alone: where earlier cycles began makes no
difference to them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence as Seqs
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdec.core.engine import Engine
from specdec.core.protocols import Cycle
from specdec.core.script import right_text
from specdec.core.types import Array, Round, Sequence
from specdec.evaluation.run import Question, Settings


@dataclass(frozen=True)
class Recording:
    """One answer, and a drafter's guesses on it."""

    question: Question
    answer: tuple[int, ...]
    right: tuple[int, ...]
    """How many of k guesses are right where they begin at each of the answer's tokens; 0 at the
    first, which is prefill's."""


def record(
    engine: Engine,
    questions: Seqs[Question],
    settings: Settings,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> list[Recording]:
    """Ask every question. engine: an idle one of the host loop; its cycle is another afterwards.
    tell: gets how many answers there are, and how many there will be. Raises UserError."""
    found: list[Recording] = []
    slots = engine.target.slots
    for start in range(0, len(questions), slots):
        found += _group(engine, questions[start : start + slots], settings)
        tell(len(found), len(questions))
    return found


def _group(engine: Engine, questions: Seqs[Question], settings: Settings) -> list[Recording]:
    drafts: dict[Sequence, list[Array]] = defaultdict(list)
    engine.cycle = _one_by_one(engine, settings.k, drafts)
    seqs = [question.sequence(settings, settings.max_tokens) for question in questions]
    engine.run_to_end(seqs)
    answers = [tuple(seq.tokens[seq.prompt_len :]) for seq in seqs]
    return [
        Recording(question, answer, (0, *_right(answer, drafts[seq])))
        for question, seq, answer in zip(questions, seqs, answers, strict=True)
    ]


def _one_by_one(engine: Engine, k: int, drafts: dict[Sequence, list[Array]]) -> Cycle:
    """A cycle that keeps none of what it guesses, and notes it down."""

    def cycle(seqs: Seqs[Sequence], single: bool) -> list[Round]:
        proposal = engine.drafter.propose(seqs, k)
        draft = np.asarray(proposal.tokens)
        step = engine.target.verify(seqs, draft)
        accepted = np.zeros(len(seqs), np.int32)
        engine.drafter.observe(seqs, step, accepted)
        for seq, row in zip(seqs, draft, strict=True):
            drafts[seq].append(row)
        return [Round(proposal, step, accepted)]

    return cycle


def _right(answer: Seqs[int], drafts: Seqs[Array]) -> list[int]:
    """Of the drafts that begin at the second token and on."""
    right = []
    for place, draft in enumerate(drafts, 1):
        came = np.array(answer[place : place + len(draft)])
        right.append(int((draft[: len(came)] == came).cumprod().sum()))
    return right


def script_row(recorded: Seqs[Recording], names: Seqs[str], k: int) -> dict[str, Any]:
    """A line of a script (`specdec.bench.script_file`): one answer, and each named drafter's
    guesses on it. Raises ValueError where the answers differ, which lossless decoding rules out."""
    first = recorded[0]
    if any(one.answer != first.answer for one in recorded):
        raise ValueError(f"prompt {first.question.prompt.id}: drafters changed the answer")
    told = {name: right_text(one.right) for name, one in zip(names, recorded, strict=True)}
    return {
        "prompt": list(first.question.ids),
        "answer": list(first.answer),
        "recorded": {"k": k, "right": told},
    }
