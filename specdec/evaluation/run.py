"""Acceptance evaluation: the same prompts with and without a drafter, in one process.

Both runs share target and seeds, so their outputs must be equal, and their speeds may be compared:
a warm-up is thrown away, then the engines take turns on small groups of prompts, each going first
as often as the other, so that neither profits from a clock that drifts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence as Seqs
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from drafters.registry import PLAIN
from specdec.core.engine import Engine
from specdec.core.errors import UserError
from specdec.core.stats import Acceptance
from specdec.core.types import Round, Sampling, Sequence
from specdec.evaluation import results
from specdec.evaluation.prompts import Prompt
from specdec.evaluation.results import Evaluation, PromptOutcome, Speed


@dataclass(frozen=True)
class Settings:
    """What to run. Prompt i has the seed `sampling.seed + i`, with any drafter."""

    drafter: str
    k: int = 4
    max_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: frozenset[int] = frozenset()
    speed_only: tuple[str, ...] = ()
    """Names of further engines to time, such as a narrower plain one; their outputs may differ."""
    resamples: int = 2000
    """Bootstrap resamples behind each interval."""
    samples: int = 3
    """How many outputs the report shows."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "stop_ids": sorted(self.stop_ids)}


@dataclass(frozen=True)
class Question:
    """A prompt's token ids, and the seed that is its own."""

    prompt: Prompt
    ids: tuple[int, ...]
    sampling: Sampling

    def sequence(self, settings: Settings, max_tokens: int) -> Sequence:
        return Sequence(
            list(self.ids),
            self.sampling,
            max_tokens=max_tokens,
            stop_ids=settings.stop_ids,
            request_id=self.prompt.id,
        )


class Racer:
    """Runs one engine and times it, by wrapping the engine's `cycle`."""

    def __init__(self, engine: Engine) -> None:
        self.outcomes: list[PromptOutcome] = []
        self._engine, self._cycle = engine, engine.cycle
        self._decode_tokens, self._decode_seconds, self._wall_seconds = 0, 0.0, 0.0
        self._last = 0.0
        engine.cycle = self._timed_cycle

    @property
    def speed(self) -> Speed:
        return Speed(self._decode_tokens, self._decode_seconds, self._wall_seconds)

    def warm_up(self, questions: Seqs[Question], settings: Settings) -> None:
        """Compile and touch everything; lengths differ, so that every batch size is met."""
        lengths = (8 * (i + 1) for i in range(len(questions)))
        self._race([q.sequence(settings, n) for q, n in zip(questions, lengths, strict=True)])
        self._decode_tokens, self._decode_seconds, self._wall_seconds = 0, 0.0, 0.0

    def run(self, questions: Seqs[Question], settings: Settings) -> None:
        sequences = [q.sequence(settings, settings.max_tokens) for q in questions]
        self._race(sequences)
        for question, seq in zip(questions, sequences, strict=True):
            tokens = tuple(seq.tokens[seq.prompt_len :])
            prompt, counts = question.prompt, seq.acceptance
            self.outcomes.append(
                PromptOutcome(
                    prompt.id, prompt.category, seq.prompt_len, tokens, seq.finish, counts
                )
            )

    def _race(self, sequences: list[Sequence]) -> None:
        engine, started = self._engine, time.perf_counter()
        for seq in sequences:
            engine.submit(seq)
        while not engine.idle:
            self._last, before = 0.0, engine.acceptance.emitted
            for event in engine.step():
                if event.error is not None:
                    raise UserError(f"prompt {event.sequence.request_id}: {event.error}")
            # A prompt that is half prefilled may still keep the device busy when the cycle starts
            # (JAX doesn't wait); after its last chunk the engine has waited for the token.
            prefilling = engine.scheduler.prefilling
            if not any(seq.prefilled for seq in prefilling):
                self._decode_seconds += self._last
                self._decode_tokens += engine.acceptance.emitted - before
        self._wall_seconds += time.perf_counter() - started

    def _timed_cycle(self, seqs: Seqs[Sequence], single: bool) -> list[Round]:
        started = time.perf_counter()
        rounds = self._cycle(seqs, single)
        for done in rounds:  # the engine waits for these next: count the wait as decoding
            for array in (done.step.chosen, done.accepted, done.proposal.tokens):
                np.asarray(array)
        self._last = time.perf_counter() - started
        return rounds


def evaluate(
    prompts: Seqs[Prompt],
    encode: Callable[[Prompt], list[int]],
    make_engine: Callable[[str], Engine],
    settings: Settings,
    *,
    decode: Callable[[Seqs[int]], str] | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Answer all prompts with the drafter `none` and with `settings.drafter`, and compare.

    make_engine: an idle engine for a drafter's name, always on the same target (engines never run
    at the same time, so they may share its slots). Plain decoding is "none".
    decode: token ids to text, for the report's samples. tell: called with the number of answers so
    far and in total.
    Raises UserError for a prompt that can't be encoded, or if none fits the context.
    """
    names = ["plain", "drafted", *settings.speed_only]
    engines = [make_engine(n) for n in (PLAIN, settings.drafter, *settings.speed_only)]
    racers = dict(zip(names, map(Racer, engines), strict=True))
    questions, skipped = questions_of(prompts, encode, settings, engines[0].target.max_len)
    slots = engines[0].target.slots
    done, total = 0, len(questions) * len(racers)
    for racer in racers.values():
        racer.warm_up(questions[:slots], settings)
    for number, group in enumerate(_groups(questions, max(4, 2 * slots))):
        turn = list(racers.values())
        for racer in turn if number % 2 == 0 else reversed(turn):
            racer.run(group, settings)
            done += len(group)
            tell(done, total)
    return _report(racers, settings, skipped, decode)


def questions_of(
    prompts: Seqs[Prompt],
    encode: Callable[[Prompt], list[int]],
    settings: Settings,
    max_len: int,
) -> tuple[list[Question], list[dict[str, Any]]]:
    """Encode; what doesn't fit the context is skipped and reported, not fatal."""
    questions, skipped = [], []
    for i, prompt in enumerate(prompts):
        try:
            ids = tuple(encode(prompt))
        except UserError as failure:
            raise UserError(f"prompt {prompt.id}: {failure}") from failure
        seed = (settings.sampling.seed + i) % 2**64
        if len(ids) >= max_len:
            reason = f"{len(ids)} tokens, but the context is {max_len} (--max-len)"
            skipped.append({"prompt": prompt.id, "reason": reason})
        else:
            questions.append(Question(prompt, ids, replace(settings.sampling, seed=seed)))
    if not questions:
        raise UserError(f"no prompt is left to evaluate: {len(skipped)} do not fit the context")
    return questions, skipped


def _groups(questions: list[Question], size: int) -> Iterator[list[Question]]:
    for start in range(0, len(questions), size):
        yield questions[start : start + size]


def _report(
    racers: dict[str, Racer],
    settings: Settings,
    skipped: list[dict[str, Any]],
    decode: Callable[[Seqs[int]], str] | None,
) -> Evaluation:
    plain, drafted = racers["plain"].outcomes, racers["drafted"].outcomes
    total = Acceptance()
    for outcome in drafted:
        total.merge(outcome.acceptance)
    return Evaluation(
        settings=settings.to_json(),
        overall=results.measure_tau("all", drafted, settings.resamples),
        categories=results.by_category(drafted, settings.resamples),
        contexts=results.by_context(drafted, settings.resamples),
        positions=results.measure_positions(total, settings.k),
        histogram=[total.lengths[i] for i in range(settings.k + 1)],
        speeds={name: racer.speed for name, racer in racers.items()},
        equality=results.compare(plain, drafted),
        distinct_4=results.distinct([o.tokens for o in plain]),
        prompts=[_prompt_row(outcome) for outcome in drafted],
        skipped=skipped,
        samples=[_sample(outcome, decode) for outcome in drafted[: settings.samples]],
    )


def _prompt_row(outcome: PromptOutcome) -> dict[str, Any]:
    return {
        "prompt": outcome.prompt_id,
        "category": outcome.category,
        "prompt_tokens": outcome.prompt_tokens,
        "tokens": len(outcome.tokens),
        "cycles": outcome.acceptance.cycles,
        "tau": outcome.acceptance.tau,
        "finish": outcome.finish,
    }


def _sample(outcome: PromptOutcome, decode: Callable[[Seqs[int]], str] | None) -> dict[str, Any]:
    shown = list(outcome.tokens) if decode is None else decode(outcome.tokens)
    return {"prompt": outcome.prompt_id, "tau": outcome.acceptance.tau, "output": shown}
