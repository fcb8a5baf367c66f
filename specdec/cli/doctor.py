"""`specdec doctor`: what is installed, whether rows are exact, whether the wiring is sound."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from rich.table import Table

from drafters.registry import resolved
from specdec.assembly.engine import make_engine
from specdec.assembly.model import Model
from specdec.assembly.prefix import host_budget
from specdec.bench.display import print_policy
from specdec.cli import topics
from specdec.cli.console import command_record, console, print_json, say_prefix_cache
from specdec.cli.progress import working
from specdec.cli.start import loaded_model
from specdec.core.config import ModelConfig, PrefixConfig, SpeculationConfig
from specdec.core.policy.report import report
from specdec.core.provenance import versions
from specdec.evaluation.wiring import probe
from targets.backend import backend_of


def doctor(
    *,
    model: topics.Model = ModelConfig(),  # noqa: B008
    prefix: topics.Prefix = PrefixConfig(),  # noqa: B008
    speculation: topics.Speculation = topics.AnySpeculation(),  # noqa: B008
    json: topics.Json = False,
) -> None:
    """Versions, devices, the one-width self-check of each compiled bucket, and a wiring probe; with
    --drafter auto, what cycles cost.

    The self-check runs at the width that holds K guesses.
    """
    backend = backend_of(model)
    host_budget(prefix)  # a mistake should not cost the time to load
    speculation = resolved(speculation, model)
    _print_environment()
    loaded = loaded_model(model, speculation, prove=False)
    console.print(f"device {backend.device(model)}")
    with working(console, "self-check"):
        checks = backend.self_check(loaded.target)
    rows = f"{loaded.target.slots} slots, width up to {loaded.target.max_draft + 1}"
    table = Table(title=f"rows: {rows}", title_justify="left")
    table.add_column("bitwise the same")
    table.add_column("results that differ", justify="right")
    for check in checks:
        mark = "[green]0[/green]" if check.passed else f"[red]{check.differing}[/red]"
        table.add_row(check.question, f"{mark} of {check.total}")
    console.print(table)
    wiring = probe(loaded)
    console.print(
        f"wiring [bold]{wiring.verdict}[/bold]: {wiring.text:.2f} nats per token on plain code, "
        f"{wiring.shuffled:.2f} shuffled; random tokens {wiring.first:.2f}, repeated "
        f"{wiring.second:.2f}; uniform {wiring.uniform:.2f}"
    )
    say_prefix_cache(loaded, prefix)
    policy = _policy(loaded, speculation)
    healthy = wiring.verdict == "sound" and all(c.passed for c in checks)
    if json:
        found = {"checks": [asdict(c) for c in checks], "wiring": asdict(wiring), "policy": policy}
        print_json(
            command_record("doctor", model=loaded.config, prefix=prefix)
            | found
            | {"verdict": wiring.verdict, "healthy": healthy}
        )
    if not healthy:
        sys.exit(1)


def _policy(model: Model, speculation: SpeculationConfig) -> dict[str, Any] | None:
    """What `auto` measured at its start; None with any other drafter."""
    if model.drafters[speculation.drafter].composite is None:
        return None
    with working(console, "measuring what cycles cost"):
        policy = make_engine(model, speculation).drafting.policy
    assert policy is not None
    found = report(policy)
    print_policy(found, console)
    return found


def _print_environment() -> None:
    table = Table.grid(padding=(0, 2))
    for name, value in versions().items():
        table.add_row(name, value)
    console.print(table)
