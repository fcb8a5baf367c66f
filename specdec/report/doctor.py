"""Doctor: whether rows are exact on this machine, whether the wiring is sound, what cycles cost."""

from __future__ import annotations

from dataclasses import asdict

from specdec.core.policy.report import report
from specdec.evaluation.wiring import probe
from specdec.report.parts import Section
from specdec.report.subject import Subject

NOT_JUDGED = "not judged: random weights prefer no order"
"""Verdict of the wiring."""


def measure(subject: Subject) -> Section:
    model, status = subject.model, subject.progress.status
    with status("self-check"):
        checks = model.backend.self_check(model.target)
    with status("scoring texts in and out of order"):
        wiring = probe(model)
    with status("measuring what cycles cost"):
        policy = subject.engine(subject.speculation.drafter).drafting.policy
    exact = all(check.passed for check in checks)
    verdict = NOT_JUDGED if subject.random else wiring.verdict
    return {
        "checks": [asdict(check) for check in checks],
        "wiring": asdict(wiring) | {"verdict": verdict},
        "healthy": exact and verdict in ("sound", NOT_JUDGED),
        "policy": None if policy is None else report(policy),
    }
