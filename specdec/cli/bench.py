"""`specdec bench`: step times against the memory roofline, and speed end to end, as a receipt."""

from __future__ import annotations

import gc
import json as json_module
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from cyclopts import Parameter

from drafters.registry import find, resolved
from specdec.assembly.model import Model
from specdec.bench import peer
from specdec.bench.aggregate import Figures, cycle_rows, first_token_rows, step_rows
from specdec.bench.display import plot_bench, print_bench, print_script
from specdec.bench.script_file import ScriptText, checked_acceptance, read_script
from specdec.bench.scripted import ScriptPlan, measure_script
from specdec.bench.sweep import Grid, measure, targets_by_width
from specdec.cli import topics
from specdec.cli.console import check_file, command_record, console, print_json
from specdec.cli.progress import working
from specdec.cli.start import loaded_model
from specdec.cli.topics import Real, Whole
from specdec.core.config import ModelConfig, SpeculationConfig
from specdec.core.errors import UserError
from specdec.core.provenance import gpus
from specdec.core.types import MAX_DRAFT
from specdec.core.writing import write_whole
from specdec.evaluation.display import require_matplotlib
from targets.arch import released
from targets.backend import backend_of, meter_of
from targets.routing import correlation_for
from targets.tokenizer import bare_ids


@Parameter(name="*", group="Bench")
@dataclass(frozen=True)
class BenchConfig:
    random: str | None = None
    "Random weights of a public model's true size (gemma-4-e4b, gemma-4-31b, ...)."
    batches: Whole = ()
    "Rows per step, as in 1,8,32; by default 1 and --slots. More slots than given are made."
    contexts: Whole = (512,)
    "Tokens that each row's cache holds while steps are timed."
    widths: Whole = ()
    "Tokens per row of a step; by default 1 (plain decoding) and one more than --ks."
    ks: Whole = ()
    "Draft tokens per cycle with which cycles are timed; by default K."
    prompt_lengths: Whole = (128,)
    "Lengths of prompts for which the time to the first token is measured."
    synthetic_tau: Real = ()
    "Speed end to end as if cycles emitted this many tokens on average."
    routing_overlap: float | None = None
    """With --random and a mixture of experts: the share of the experts picked in a verify (of K =
    4) that another row picks too. By default as many as by chance (0.12 for 26B-A4B); 0.38 is
    reported for real texts, where rows pick similar experts."""
    script: Path | None = None
    """Measure speed and tau on these texts only, as if the target generated them. JSON lines
    (.jsonl) of {"prompt", "answer"}, optionally with "prediction", "acceptance" and "recorded", as
    eval-acceptance --record writes them; or a text file, with its first half as the prompt."""
    acceptance: Real = ()
    """With --script: the shares of cycles in which a drafter with weights keeps at least 1, 2, ...
    guesses, as eval-acceptance reports them by position."""
    max_tokens: int | None = None
    "Tokens per row of the end-to-end runs; by default 128, or a script's whole answers."
    repeats: int = 2
    "How often everything is measured; the receipt contains the spread."
    peer: Literal["transformers"] | None = None
    "Run this engine beside, on random weights of the same dimensions."
    out: Path | None = None
    "Where to write the receipt (JSON)."
    plot: Path | None = None
    "Where to draw the share of the bandwidth by batch and by context (PNG)."


def bench(
    *,
    model: topics.Model = ModelConfig(),  # noqa: B008
    speculation: topics.Speculation = topics.AnySpeculation(),  # noqa: B008
    config: BenchConfig = BenchConfig(),  # noqa: B008
    json: topics.Json = False,
) -> None:
    """Steps by batch, width and context against the measured bandwidth; cycles; speed end to end;
    or, with --script, speed on given texts.

    Exit code 1 if any drafter or loop changes a token.
    """
    speculation = resolved(speculation, model, random=config.random is not None)
    grid = _grid(config, model, speculation)
    _refuse(config, model, speculation, grid)
    texts = None if config.script is None else read_script(config.script)
    model = replace(model, slots=max(model.slots, *grid.batches))
    widest = replace(speculation, k=max(speculation.k, *grid.ks, *(w - 1 for w in grid.widths)))
    document = _measured(config, model, speculation, widest, grid, texts)
    _save(document, config)
    if config.peer is not None:
        gc.collect()  # the model's memory is the peer's now
        document["peer"] = _peer(model, speculation, grid, config)
        _save(document, config)
    if json:
        print_json(document)
    if not document["equal"]:
        raise SystemExit(1)


def _measured(
    config: BenchConfig,
    model: ModelConfig,
    speculation: SpeculationConfig,
    widest: SpeculationConfig,
    grid: Grid,
    texts: list[ScriptText] | None,
) -> dict[str, Any]:
    """Load, measure and print; the receipt so far. The model is let go of at the end."""
    random, overlap = config.random or "", config.routing_overlap
    loaded = loaded_model(model, widest, random=random, overlap=overlap)
    document = command_record("bench", model=loaded.config, speculation=speculation, bench=config)
    document |= {"architecture": loaded.name}
    if texts is not None:
        plan = _script_plan(texts, config, loaded, speculation, grid)
        return document | _say_script(loaded, speculation, plan)
    grid.refuse(loaded.target.max_len, loaded.target.max_draft, speculation.k)
    document |= _measure(loaded, speculation, grid, config.repeats)
    print_bench(document, console)
    return document


def _grid(config: BenchConfig, model: ModelConfig, speculation: SpeculationConfig) -> Grid:
    ks = config.ks or (speculation.k,)
    return Grid(
        batches=config.batches or tuple(sorted({1, model.slots})),
        contexts=config.contexts,
        widths=config.widths or tuple(sorted({1, *(k + 1 for k in ks)})),
        ks=ks,
        prompt_lengths=config.prompt_lengths,
        taus=config.synthetic_tau,
        max_tokens=config.max_tokens or 128,
    )


def _refuse(
    config: BenchConfig, model: ModelConfig, speculation: SpeculationConfig, grid: Grid
) -> None:
    """Raise UserError for invalid options, before any measurement."""
    for name in ("batches", "contexts", "widths", "prompt_lengths"):
        if min(getattr(grid, name), default=1) < 1:
            option = name.replace("_", "-")
            raise UserError(f"--{option} must be 1 or more, got {min(getattr(grid, name))}")
    if not 0 <= min(grid.ks) <= max(grid.ks) <= MAX_DRAFT:
        raise UserError(f"--ks must be 0 to {MAX_DRAFT}, got {', '.join(map(str, grid.ks))}")
    if config.repeats < 1 or (config.max_tokens is not None and config.max_tokens < 2):
        raise UserError("--repeats must be 1 or more, --max-tokens 2 or more")
    _refuse_beside_a_script(config)
    _refuse_overlap(config, model)
    if config.synthetic_tau and find(speculation.drafter).part is not None:
        raise UserError(
            "--synthetic-tau needs a single drafter: choose one with --drafter, as "
            f"{speculation.drafter} combines several"
        )
    backend_of(model)
    if config.peer is not None:
        peer.require()
    for option, file in (("--out", config.out), ("--plot", config.plot)):
        if file is not None:
            check_file(file, option)
    if config.plot is not None:
        require_matplotlib()


def _refuse_overlap(config: BenchConfig, model: ModelConfig) -> None:
    if config.routing_overlap is None:
        return
    if config.random is None:
        raise UserError("--routing-overlap is for --random NAME: a text routes as it does")
    if model.backend != "cuda":
        raise UserError("--routing-overlap needs --backend cuda")
    moe = released(config.random).moe
    if moe is None:
        raise UserError(f"--routing-overlap is for a mixture of experts: {config.random} has none")
    correlation_for(config.routing_overlap, moe)


def _refuse_beside_a_script(config: BenchConfig) -> None:
    if config.script is None and config.acceptance:
        raise UserError("--acceptance needs --script FILE: give the texts, or leave it out")
    if config.script is None:
        return
    if config.acceptance:
        checked_acceptance(config.acceptance, "--acceptance")
    for option, used in (
        ("--synthetic-tau", config.synthetic_tau),
        ("--peer", config.peer),
        ("--plot", config.plot),
        ("--widths", config.widths),
    ):
        if used:
            raise UserError(f"{option} is not measured with --script: leave one of them out")


def _script_plan(
    texts: list[ScriptText],
    config: BenchConfig,
    model: Model,
    speculation: SpeculationConfig,
    grid: Grid,
) -> ScriptPlan:
    """Raises UserError."""
    ways = model.tokenizer.encode, partial(bare_ids, tokenizer=model.tokenizer)
    rows = [text.encode(*ways, config.max_tokens) for text in texts]
    if config.batches and max(config.batches) > len(rows):
        raise UserError(
            f"--batches {max(config.batches)}: the script has {len(rows)} requests to decode "
            "together, no more"
        )
    batches = tuple(sorted({min(batch, len(rows)) for batch in grid.batches}))
    plan = ScriptPlan(rows, config.acceptance or None, batches, grid.ks, config.repeats)
    plan.refuse(speculation, config.random is not None, model.target)
    return plan


def _say_script(model: Model, speculation: SpeculationConfig, plan: ScriptPlan) -> dict[str, Any]:
    """Measure and print a script's figures; returns their part of the receipt."""
    rows = measure_script(model, speculation, plan, partial(working, console))
    document = {
        "gpus": [gpus()],
        "requests": len(plan.rows),
        "prompt_tokens": sum(len(row.prompt) for row in plan.rows),
        "script": rows,
        "equal": not any(row["differing"] for row in rows),
    }
    print_script(document, console)
    return document


def _measure(
    model: Model, speculation: SpeculationConfig, grid: Grid, repeats: int
) -> dict[str, Any]:
    """Every figure of the receipt. The bandwidth is the best that was seen in this run."""
    meter, figures, bandwidths, machine = meter_of(model.target), Figures(), [], [gpus()]
    targets = targets_by_width(model, grid)
    for _ in range(repeats):
        bandwidths.append(meter.read_bandwidth())
        measure(model, targets, speculation, grid, figures, partial(working, console))
        machine.append(gpus())

    def needed(batch: int, context: int, width: int) -> int:
        return meter.step_bytes(batch, width, context)

    runs = figures.run_rows("end to end")
    same = len({run["digest"] for run in runs}) == 1
    return {
        "gpus": machine,
        "read_bandwidth": max(bandwidths),
        "read_bandwidths": bandwidths,
        "steps": step_rows(figures, needed, max(bandwidths)),
        "cycles": cycle_rows(figures, needed, max(bandwidths)),
        "first_token": first_token_rows(figures),
        "runs": runs,
        "synthetic": figures.run_rows("synthetic"),
        "equal": same and all(run["repeatable"] for run in runs),
    }


def _peer(
    model: ModelConfig, speculation: SpeculationConfig, grid: Grid, config: BenchConfig
) -> dict[str, Any]:
    with working(console, "the peer, transformers"):
        text = peer.text_config(config.random, model.model)
        figures = peer.measure(text, grid, speculation.k, model)
    for row in figures["runs"]:
        result = row.get("failure") or f"{row['tokens_per_second']:.1f} tok/s"
        console.print(f"transformers, {row['name']}, batch {row['batch']}: {result}", markup=False)
    return figures


def _save(document: dict[str, Any], config: BenchConfig) -> None:
    """Write receipt and picture; called before the peer runs too, which may take long or crash."""
    if config.out is not None:
        write_whole(config.out, json_module.dumps(document, indent=1))
    if config.plot is not None:
        plot_bench(document, config.plot)
