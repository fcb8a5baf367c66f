"""Parity: transformers scores the ids that this engine chose.

The ids have to exist first, so this engine answers and ends; only then does transformers run, in a
process of its own. Their weights are never in memory at the same time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from specdec.core.config import ModelConfig
from specdec.core.types import Sequence
from specdec.evaluation.run import Question
from specdec.report.identity import dtype_name
from specdec.report.parts import Section
from specdec.report.questions import LONG
from specdec.report.subject import Condition, Subject
from targets.json_files import read_object
from targets.mini import checkpoint_path

ANSWERS = 8
"""Answers that are compared, at most."""
TOKENS = 32
"""Tokens of each of them, at most."""
COMPARABLE = ("float32", "bfloat16")
"""Types in which both compute."""
SCORER = "specdec.report.transformers_scores"
"""The module that the other process runs."""


def teach(subject: Subject) -> Section:
    """What is kept for the comparison: ids of a few greedy answers with the engine's
    log-probabilities, from the drafter with weights; or why there is none."""
    if why := _incomparable(subject):
        return {"why_not": why}
    questions, _ = subject.questions(Condition(0.0, False))
    short = [q for q in questions if q.prompt.category != LONG][
        :: max(1, len(questions) // ANSWERS)
    ]
    if not short:
        return {"why_not": "all prompts are long"}
    with subject.progress.status("answers for the comparison with transformers"):
        texts = _scored(subject, short[:ANSWERS])
    return {"dtype": dtype_name(subject.model.target.dtype), "texts": texts}


def is_possible(teacher: Section) -> bool:
    """Whether there is something to compare."""
    return "why_not" not in teacher


def measure(teacher: Section, config: ModelConfig) -> Section:
    """The section; runs transformers."""
    if not is_possible(teacher):
        return _not_compared(teacher["why_not"])
    folder = checkpoint_path(config.model).resolve()  # the process runs elsewhere
    request = teacher | {"folder": str(folder), "device": config.device}
    scores = _scores(request)
    if "why_not" in scores:
        return _not_compared(scores["why_not"])
    return compare(teacher["texts"], scores["texts"]) | {
        "dtype": teacher["dtype"],
        "transformers": scores["version"],
        "device": scores["device"],
    }


def compare(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> Section:
    """Figures over all answers. ours: `prompt_len`, `ids` and `logprobs` of the tokens behind the
    prompt. theirs: `logprobs` of the same tokens, and `best` and `best_logprobs`, the likeliest
    token at each place."""
    deltas, same, first, place = [], [], None, 0
    for own, other in zip(ours, theirs, strict=True):
        answer = own["ids"][own["prompt_len"] :]
        deltas += np.abs(np.subtract(own["logprobs"], other["logprobs"])).tolist()
        for at, (chosen, best) in enumerate(zip(answer, other["best"], strict=True)):
            same.append(chosen == best)
            if chosen != best and first is None:
                margin = other["best_logprobs"][at] - other["logprobs"][at]
                first = {"position": place + at, "margin": margin}
        place += len(answer)
    return {
        "compared": True,
        "tokens": len(same),
        "max_abs_dlogprob": max(deltas),
        "mean_abs_dlogprob": float(np.mean(deltas)),
        "top1_agreement": float(np.mean(same)),
        "first_difference": first,
    }


def _incomparable(subject: Subject) -> str | None:
    target, config = subject.model.target, subject.model.config
    if subject.random:
        return "random weights"
    dtypes = {dtype_name(target.dtype), dtype_name(target.kv_dtype)}
    if not dtypes <= {*COMPARABLE} or config.int8:
        return f"not comparable: {'int8' if config.int8 else ' and '.join(sorted(dtypes))}"
    settings = read_object(checkpoint_path(config.model) / "config.json")
    if "quantization_config" in settings or "quantization_config" in (
        settings.get("text_config") or {}
    ):
        return "not comparable: the checkpoint is quantised"
    return None


def _scored(subject: Subject, questions: list[Question]) -> list[dict[str, Any]]:
    engine = subject.engine(subject.single)
    settings = subject.settings(Condition(0.0, False))
    seqs = [_sequence(question, settings.stop_ids) for question in questions]
    logprobs: dict[Sequence, list[float]] = {seq: [] for seq in seqs}
    for event in engine.run(seqs):
        logprobs[event.sequence] += [token.logprob for token in event.logprobs or ()]
    return [
        {"prompt_len": seq.prompt_len, "ids": seq.tokens, "logprobs": logprobs[seq]} for seq in seqs
    ]


def _sequence(question: Question, stop_ids: frozenset[int]) -> Sequence:
    sampling = replace(question.sampling, logprobs=0)
    return Sequence(list(question.ids), sampling, max_tokens=TOKENS, stop_ids=stop_ids)


def _scores(request: dict[str, Any]) -> dict[str, Any]:
    """What the other process prints; its own words are not shown, as they may hold paths."""
    done = subprocess.run(
        [sys.executable, "-m", SCORER],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return {"why_not": f"transformers' process ended with exit code {done.returncode}"}


def _not_compared(why: str) -> Section:
    return {"compared": False, "why_not": why}
