"""A policy's statistics and estimates as JSON values, for receipts, the doctor and /metrics."""

from __future__ import annotations

from typing import Any

from specdec.core.constraint import KNOWN
from specdec.core.policy.choice import Policy
from specdec.core.policy.costs import Work


def report(policy: Policy, rows: int = 1) -> dict[str, Any]:
    """Rows by drafter of their draft, the cost table, survival by bucket, and the estimate for
    every drafter and K alone with a batch of `rows` rows."""
    survival = {
        name: {str(b): _rounded(table.survival(b)) for b in table.buckets}
        for name, table in policy.tables.items()
    }
    return {
        "chosen": dict(policy.chosen),
        "seconds": [{**w._asdict(), "seconds": s} for w, s in policy.costs.rows()],
        "survival": survival,
        "what_if": [what_if(policy, name, k, rows) for name, k in alternatives(policy)],
    }


def alternatives(policy: Policy) -> list[tuple[str, int]]:
    """Plain decoding, and each drafter with a survival table, with each K."""
    drafters = sorted(policy.tables.keys() - {*KNOWN})
    return [("none", 0), *((name, k) for name in drafters for k in range(1, policy.k + 1))]


def what_if(policy: Policy, drafter: str, k: int, rows: int) -> dict[str, Any]:
    """Estimated tau and speed if this drafter alone drafted k tokens wherever it has guesses, by
    its acceptance on the texts so far and the measured costs."""
    tau = 1 + (policy.share(drafter) * policy.table(drafter).overall()[k] if k else 0.0)
    seconds = policy.costs.seconds(Work(rows, k, k if drafter == policy.weighted else 0))
    speed = round(rows * tau / seconds, 2)
    return {"drafter": drafter, "k": k, "tau": round(tau, 4), "tokens_per_second": speed}


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 4) for value in values]
