"""Speed: times of answers as a caller of the Python API sees them, by drafter and users."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence as Seqs
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from drafters.registry import PLAIN, find
from specdec.assembly.engine import loop_of
from specdec.bench.aggregate import spread
from specdec.llm import LLM
from specdec.llm_types import SamplingParams
from specdec.report.parts import Section
from specdec.report.profile import USERS
from specdec.report.questions import LONG
from specdec.report.subject import Condition, Subject

WARM_TOKENS = 16
"""Tokens of the answers that compile and touch everything before anything is timed."""
FIGURES = ("ttft", "tpot", "itl", "e2el")
"""Time to the first token, per token after it, between updates, and of the whole answer."""
DEFINITIONS = {
    "tpot_ms": "(e2el - ttft) / (tokens - 1), per request",
    "itl_ms": "between two updates of a request; an update may hold several tokens, so with a "
    "drafter it is longer than tpot",
    "output_throughput": "tokens per second of all users together, prompts included in the time",
    "per_user": "output_throughput / users",
    "speedup": "output_throughput / that of plain decoding with as many users, same run",
    "spread": "(largest - smallest) / median of output_throughput over the repeats",
}


@dataclass(frozen=True)
class Timed:
    """One streamed answer. Times in seconds."""

    ids: tuple[int, ...]
    ttft: float
    e2el: float
    gaps: tuple[float, ...]
    """Between updates with tokens."""

    @property
    def tpot(self) -> float:
        return (self.e2el - self.ttft) / max(1, len(self.ids) - 1)


@dataclass(frozen=True)
class Pass:
    """One measurement of a drafter with so many users."""

    answers: list[Timed]
    seconds: float

    @property
    def throughput(self) -> float:
        return sum(len(one.ids) for one in self.answers) / self.seconds


def measure(subject: Subject) -> Section:
    """The section. Drafters take turns, so that a clock that drifts favours none."""
    prompts = _prompts(subject)
    users = [count for count in USERS if count <= subject.model.target.slots]
    passes: dict[tuple[str, int], list[Pass]] = defaultdict(list)
    with ExitStack() as stack:
        doors = {name: stack.enter_context(_door(subject, name)) for name in _drafters(subject)}
        rounds = [
            (door, n) for _ in range(subject.profile.repeats) for door in doors for n in users
        ]
        title = f"timing answers of {subject.output_len} tokens"
        with subject.progress.counting(title, len(rounds)) as counter:
            for llm in doors.values():
                _run(llm, prompts, max(users), max(users), WARM_TOKENS)
            for number, (name, count) in enumerate(rounds, 1):
                requests = max(count, subject.profile.least_requests)
                done = _run(doors[name], prompts, count, requests, subject.output_len)
                passes[name, count].append(done)
                counter.update(number)
    rows = [_row(name, count, passes, prompts) for name in doors for count in users]
    return {"definitions": DEFINITIONS, "temperature": 0.0, "rows": rows}


def _drafters(subject: Subject) -> list[str]:
    """Plain decoding first: the others are compared with it."""
    combined = subject.speculation.drafter
    own = (*subject.texts, subject.single) if subject.profile.every_drafter else (subject.single,)
    loop, backend = loop_of(subject.model, subject.speculation), subject.model.target.backend
    able = [name for name in own if loop == "host" or backend in find(name).device_loops]
    return list(dict.fromkeys((PLAIN, *able, combined)))


def _door(subject: Subject, drafter: str) -> LLM:
    with subject.progress.status(f"starting {drafter}"):
        return LLM(subject.model, replace(subject.speculation, drafter=drafter))


def _prompts(subject: Subject) -> list[list[int]]:
    """Token ids of prompts that are not long, of as many categories as there are; as many as the
    most users, or fewer where there are no more."""
    questions, _ = subject.questions(Condition(0.0, False))
    room = subject.model.target.max_len - subject.output_len
    fitting = [q for q in questions if len(q.ids) <= room and q.prompt.category != LONG]
    turns: dict[str, int] = defaultdict(int)
    numbered = []
    for question in fitting or questions[:1]:
        numbered.append((turns[question.prompt.category], question))
        turns[question.prompt.category] += 1
    numbered.sort(key=lambda pair: pair[0])  # the first of each category, then the second, …
    return [list(question.ids) for _, question in numbered[: max(USERS)]]


def _run(llm: LLM, prompts: Seqs[list[int]], users: int, requests: int, tokens: int) -> Pass:
    """So many users, each sending a request when its last one is answered."""
    asked = [prompts[i % len(prompts)] for i in range(requests)]
    began = perf_counter()
    with ThreadPoolExecutor(users) as pool:
        answers = list(pool.map(lambda ids: _timed(llm, ids, tokens), asked))
    return Pass(answers, perf_counter() - began)


def _timed(llm: LLM, prompt: list[int], tokens: int) -> Timed:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    began, moments, ids = perf_counter(), [], []
    for chunk in llm.stream(prompt, params):
        if chunk.token_ids:
            moments.append(perf_counter())
            ids += chunk.token_ids
    gaps = tuple(np.diff(moments).tolist())
    return Timed(tuple(ids), moments[0] - began, moments[-1] - began, gaps)


def _row(
    drafter: str, users: int, passes: dict[tuple[str, int], list[Pass]], prompts: list[list[int]]
) -> dict[str, Any]:
    own, plain = passes[drafter, users], passes[PLAIN, users]
    answers = [one for done in own for one in done.answers]
    speeds = [done.throughput for done in own]
    speed, plain_speed = (float(np.median([p.throughput for p in runs])) for runs in (own, plain))
    digests = {_digest(done.answers) for done in own}
    asked = [prompts[i % len(prompts)] for i in range(len(own[0].answers))]
    row: dict[str, Any] = {"drafter": drafter, "users": users, "requests": len(answers)}
    row |= _statistics(answers)
    return row | {
        "output_throughput": speed,
        "per_user": speed / users,
        "input_len": float(np.mean([len(ids) for ids in asked])),
        "output_len": float(np.mean([len(one.ids) for one in answers])),
        "speedup": speed / plain_speed,
        "spread": spread(speeds),
        "answers_sha256": min(digests),
        "equal": digests == {_digest(done.answers) for done in plain},
    }


def _statistics(answers: Seqs[Timed]) -> dict[str, float]:
    """Mean, median and 99th percentile of each figure, in milliseconds."""
    gaps = [gap for one in answers for gap in one.gaps]
    by_request = {
        name: [getattr(one, name) for one in answers] for name in ("ttft", "tpot", "e2el")
    }
    samples = by_request | {"itl": gaps or [0.0]}
    row = {}
    for name in FIGURES:
        values = 1000 * np.array(samples[name])
        row[f"mean_{name}_ms"] = float(values.mean())
        row[f"median_{name}_ms"] = float(np.median(values))
        row[f"p99_{name}_ms"] = float(np.quantile(values, 0.99))
    return row


def _digest(answers: Seqs[Timed]) -> str:
    return hashlib.sha256(repr([one.ids for one in answers]).encode()).hexdigest()
