"""Acceptance: answers recorded once, and every drafter and depth replayed on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seqs
from typing import Any

from specdec.core.protocols import Drafter
from specdec.core.stats import Acceptance, vllm_fields
from specdec.evaluation import results
from specdec.evaluation.record import Recording, record
from specdec.evaluation.results import PromptOutcome
from specdec.report.parts import Section
from specdec.report.profile import K
from specdec.report.questions import ALL
from specdec.report.replay import replayed
from specdec.report.subject import Condition, Subject

RESAMPLES = 2000
"""Bootstrap resamples behind each interval."""
DEFINITIONS = {
    "tau": "tokens emitted / verify passes, passes without a guess included; low, high: its 95 % "
    "interval, by resampling prompts",
    "mean_acceptance_length": "vLLM's: 1 + accepted draft tokens / steps, where passes without a "
    "guess are no steps",
    "draft_acceptance_rate": "vLLM's: accepted / proposed draft tokens",
    "per_position_acceptance_rates": "vLLM's: steps that accepted the guess at this position / "
    "steps",
    "context": "tokens of the text before each pass, the prompt's included",
    "distinct_4": "distinct 4-grams / all 4-grams of the answers; 0 is a loop, which flatters "
    "lookup",
}
RANDOM = "random weights: no guess is right, which says nothing of a drafter"


def measure(subject: Subject) -> Section:
    """The section. Raises UserError."""
    if subject.random:
        return {"definitions": DEFINITIONS, "conditions": [], "rows": [], "why_not": RANDOM}
    conditions, rows = [], []
    for condition in subject.conditions:
        recordings, unfitting = _recorded(subject, condition)
        subject.plain[condition] = [_as_outcome(one) for one in recordings]  # no guess was taken
        conditions.append(_condition_row(condition, recordings, unfitting))
        with subject.progress.status(f"replaying, {condition}"):
            rows += _rows(subject, condition, recordings)
    return {"definitions": DEFINITIONS, "conditions": conditions, "rows": rows}


def tau_of(acceptance: Section, condition: Condition, drafter: str) -> float | None:
    """The replayed tau of all prompts with K guesses; None where nothing was replayed."""
    asked = condition.to_json() | {"drafter": drafter, "k": K, "category": ALL, "context": ALL}
    found = (row["tau"] for row in acceptance["rows"] if row.items() >= asked.items())
    return next(found, None)


def _recorded(subject: Subject, condition: Condition) -> tuple[list[Recording], int]:
    """Each prompt's answer, with how often the drafter with weights is right; and how many prompts
    do not fit."""
    questions, unfitting = subject.questions(condition)
    engine = subject.engine(subject.single, loop="host")
    title = f"recording, {condition}"
    with subject.progress.counting(title, len(questions)) as counter:
        found = record(
            engine, questions, subject.settings(condition), lambda done, total: counter.update(done)
        )
    return found, unfitting


def _condition_row(
    condition: Condition, recordings: Seqs[Recording], unfitting: int
) -> dict[str, Any]:
    answers = [one.answer for one in recordings]
    return condition.to_json() | {
        "prompts": len(recordings),
        "prompts_too_long": unfitting,
        "tokens": sum(map(len, answers)),
        "distinct_4": round(results.distinct(answers), 4),
        "recorded_sha256": results.digest([_as_outcome(one) for one in recordings]),
    }


def _as_outcome(one: Recording) -> PromptOutcome:
    prompt = one.question.prompt
    return PromptOutcome(prompt.id, prompt.category, 0, one.answer, None, Acceptance())


def _rows(
    subject: Subject, condition: Condition, recordings: Seqs[Recording]
) -> Iterator[dict[str, Any]]:
    for drafter, make in _replays(subject):
        for k in subject.profile.ks:
            where = condition.to_json() | {"drafter": drafter, "k": k}
            for row in _split(replayed(recordings, k, make), k):
                yield where | row


def _replays(subject: Subject) -> Iterator[tuple[str, Callable[[int], Drafter] | None]]:
    """Each drafter that can be replayed, and how one is made; None for the recorded one."""
    for name in subject.texts:
        yield name, subject.model.drafters[name].make
    if subject.weighted is not None:
        yield subject.weighted, None


def _split(outcomes: Seqs[PromptOutcome], k: int) -> Iterator[dict[str, Any]]:
    """A row for all prompts and for each category; in these, for all lengths and for each."""
    names = sorted({outcome.category for outcome in outcomes})
    groups = {ALL: outcomes} if len(names) == 1 else {ALL: outcomes, **_by(outcomes, names)}
    for category, group in groups.items():
        for context, held in _by_context(group).items():
            yield {"category": category, "context": context} | _figures(held, k)


def _by(outcomes: Seqs[PromptOutcome], names: Seqs[str]) -> dict[str, list[PromptOutcome]]:
    return {name: [one for one in outcomes if one.category == name] for name in names}


def _by_context(outcomes: Seqs[PromptOutcome]) -> dict[str, list[PromptOutcome]]:
    """By length of the text; one length alone is the same as all."""
    spans = results.split_by_context(outcomes)
    return {ALL: list(outcomes)} | (spans if len(spans) > 1 else {})


def _figures(outcomes: Seqs[PromptOutcome], k: int) -> dict[str, Any]:
    total = Acceptance()
    for outcome in outcomes:
        total.merge(outcome.acceptance)
    tau = results.measure_tau("", outcomes, RESAMPLES)
    rates = [total.accepted_at[i] / max(1, total.drafts) for i in range(k)]
    return {
        "prompts": tau.prompts,
        "tokens": total.emitted,
        "verify_passes": total.cycles,
        "tau": tau.tau,
        "low": tau.low,
        "high": tau.high,
        **vllm_fields(total.histogram(k), total.drafted),
        "per_position_acceptance_rates": rates,
        "distinct_4": results.distinct([outcome.tokens for outcome in outcomes]),
    }
