"""Records, for every token of an answer, how many guesses of a draft that begins there are right.
`bench --script` replays such records.

A request decodes one token per cycle and accepts no guesses; each cycle's draft is compared with
the complete answer. So the record covers a cycle that begins at any token. Guesses of drafters with
weights depend only on the text and the target's states, not on where earlier cycles began.
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
    """For each token of the answer, how many of k guesses are right if the draft begins there; 0 at
    the first token, which prefill chooses."""


def record(
    engine: Engine,
    questions: Seqs[Question],
    settings: Settings,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> list[Recording]:
    """Answer and record all questions. engine: idle, with the host loop; its `cycle` is replaced.
    tell: called with the number of answers so far and in total. Raises UserError."""
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
    """A cycle that accepts no guesses and appends each row's draft to `drafts`."""

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
    """How many guesses of each draft are right; the first draft begins at the second token."""
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
    right = {name: right_text(one.right) for name, one in zip(names, recorded, strict=True)}
    return {
        "prompt": list(first.question.ids),
        "answer": list(first.answer),
        "recorded": {"k": k, "right": right},
    }
