"""Equality: the drafter changes no token, whether answers are greedy or sampled."""

from __future__ import annotations

from typing import Any

from specdec.core.stats import Acceptance
from specdec.evaluation import results
from specdec.evaluation.results import PromptOutcome
from specdec.report.acceptance import tau_of
from specdec.report.parts import Section
from specdec.report.profile import K
from specdec.report.subject import Condition, Subject


def measure(subject: Subject, acceptance: Section) -> Section:
    """The section. acceptance: that section, whose answers and taus must be those of real runs."""
    rows = [_row(subject, condition, acceptance) for condition in subject.conditions]
    return {"drafter": subject.single, "k": K, "rows": rows}


def _row(subject: Subject, condition: Condition, acceptance: Section) -> dict[str, Any]:
    plain = subject.plain_answers(condition)
    drafted = subject.answered(subject.engine(subject.single), condition, "drafted")
    found = results.compare(plain, drafted)
    run, replay = _tau(drafted), tau_of(acceptance, condition, subject.single)
    recorded = _recorded_digest(acceptance, condition)
    return condition.to_json() | {
        "equal": found.equal and recorded in (None, found.plain_sha256),
        "plain_sha256": found.plain_sha256,
        "drafted_sha256": found.drafted_sha256,
        "recorded_sha256": recorded,
        "first_difference": found.first_difference and _place(plain, found.first_difference),
        "prompts": len(plain),
        "tokens": sum(len(outcome.tokens) for outcome in plain),
        "run_tau": run,
        "replay_tau": replay,
        "taus_agree": None if replay is None else run == replay,
    }


def _tau(outcomes: list[PromptOutcome]) -> float:
    total = Acceptance()
    for outcome in outcomes:
        total.merge(outcome.acceptance)
    return total.tau


def _place(plain: list[PromptOutcome], difference: dict[str, Any]) -> dict[str, int]:
    """The prompt's number and the position: neither the prompt's name nor a token of its answer."""
    names = [outcome.prompt_id for outcome in plain]
    return {
        "prompt": names.index(difference["prompt"]) + 1,
        "position": difference["position"],
    }


def _recorded_digest(acceptance: Section, condition: Condition) -> str | None:
    asked = condition.to_json().items()
    found = (row for row in acceptance["conditions"] if row.items() >= asked)
    return next((row["recorded_sha256"] for row in found), None)
