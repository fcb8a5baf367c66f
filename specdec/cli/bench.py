"""`specdec bench`: step times against the memory roofline, and speed end to end, as a receipt."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from specdec.bench import Run, StepTime, end_to_end, fill, step_time
from specdec.cli.assemble import (
    Model,
    check_folder,
    command_record,
    console,
    jax_options,
    load_model,
    make_engine,
    print_json,
    require_exact,
)
from specdec.cli.config import ModelConfig, SpeculationConfig
from specdec.errors import UserError


def bench(
    *,
    model: ModelConfig = ModelConfig(),  # noqa: B008
    speculation: SpeculationConfig = SpeculationConfig(),  # noqa: B008
    random: str | None = None,
    contexts: tuple[int, ...] = (512,),
    max_tokens: int = 128,
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Step time by batch and context, its share of the measured bandwidth, speed end to end.

    Exit code 1 if any drafter or loop changes a token.

    Parameters
    ----------
    random
        Random weights of a public model's true size (gemma-4-e4b, gemma-4-31b, ...).
    contexts
        Tokens that each row's cache holds while steps are timed.
    max_tokens
        Tokens per row of the end-to-end runs.
    out
        Where to write the receipt (JSON).
    json
        End stdout with one JSON document.
    """
    from targets.jax.roofline import read_bandwidth

    speculation = speculation.resolved()
    if out is not None:
        check_folder(out.parent)
    if min(contexts) < 1:
        raise UserError(f"--contexts must be 1 or more, got {min(contexts)}")
    loaded = _random_model(random, model, speculation) if random else load_model(model, speculation)
    bandwidth = read_bandwidth()
    if max(contexts) + loaded.target.max_draft + 1 >= loaded.target.max_len:
        raise UserError(f"--contexts: {max(contexts)} does not fit --max-len {model.max_len}")
    with console.status("timing steps"):
        steps = _steps(loaded, contexts, speculation.k, bandwidth)
    with console.status("end to end"):
        runs = _runs(loaded, speculation, max_tokens)
    equal = len({run.digest for run in runs}) == 1
    _print(steps, runs, bandwidth, equal)
    document = command_record("bench", model=model, speculation=speculation) | {
        "architecture": random or loaded.name,
        "read_bandwidth": bandwidth,
        "steps": steps,
        "runs": [asdict(run) for run in runs],
        "equal": equal,
    }
    if out is not None:
        out.write_text(json_module.dumps(document, indent=1))
    if json:
        print_json(document)
    if not equal:
        raise SystemExit(1)


def _random_model(name: str, model: ModelConfig, speculation: SpeculationConfig) -> Model:
    from targets import mini
    from targets.arch import released
    from targets.jax.load import random_target
    from targets.tokenizer import load_tokenizer

    target = random_target(released(name), jax_options(model, speculation))
    made = Model(name, target, load_tokenizer(mini.path("mini")))
    require_exact(made, speculation)
    return made


def _steps(
    loaded: Model, contexts: tuple[int, ...], k: int, bandwidth: float
) -> list[dict[str, Any]]:
    """Each batch and context, at the exact width and at width 1, with its share of bandwidth."""
    from targets.jax.load import narrowed
    from targets.jax.roofline import cache_bytes, weight_bytes

    rows: list[dict[str, Any]] = []
    narrow = narrowed(loaded.target)
    for context in contexts:
        for batch in sorted({1, loaded.target.slots}):
            for target, draft in ((narrow, 0), (loaded.target, k)):
                seqs = fill(target, batch, context, target.vocab)
                time: StepTime = step_time(target, seqs, draft)
                rows_fed = batch * target.plan.width
                needed = weight_bytes(target, rows_fed) + cache_bytes(target, batch, context)
                share = needed / time.seconds / bandwidth
                rows.append(asdict(time) | {"bytes": needed, "bandwidth_share": share})
    return rows


def _runs(loaded: Model, speculation: SpeculationConfig, max_tokens: int) -> list[Run]:
    """Plain, drafted, and drafted in the device loop, on prompts that repeat themselves."""
    generator = np.random.default_rng(1)
    prompts = [
        [2, *generator.integers(3, loaded.target.vocab, 24).tolist() * 2]
        for _ in range(loaded.target.slots)
    ]
    runs = []
    for drafter in dict.fromkeys(("none", speculation.drafter)):
        for loop in ("host", "device"):
            config = replace(speculation, drafter=drafter, loop=loop)
            engine = partial(make_engine, loaded, config)
            runs.append(end_to_end(f"{drafter}, {loop} loop", engine, prompts, max_tokens))
    return runs


def _print(steps: list[dict[str, Any]], runs: list[Run], bandwidth: float, equal: bool) -> None:
    table = Table(title=f"steps (measured read bandwidth {bandwidth / 1e9:.0f} GB/s)")
    for name in ("batch", "context", "width", "ms", "share of bandwidth"):
        table.add_column(name, justify="right")
    for row in steps:
        cells = (row["batch"], row["context"], row["width"])
        share = f"{row['bandwidth_share']:.2f}"
        table.add_row(*map(str, cells), f"{1000 * row['seconds']:.3f}", share)
    console.print(table)
    for run in runs:
        console.print(f"{run.name}: {run.tokens_per_second:.1f} tok/s, tau {run.tau:.2f}")
    console.print("outputs equal" if equal else "[red]OUTPUTS DIFFER[/red]")
