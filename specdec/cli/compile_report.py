"""`specdec compile-report`: the decode/verify program, compiled for a TPU that is not there."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cyclopts import Parameter

from specdec.bench.display import print_table
from specdec.cli import topics
from specdec.cli.console import check_file, console, print_json
from specdec.cli.progress import working
from specdec.cli.topics import Whole
from specdec.core.errors import UserError
from specdec.core.provenance import run_record
from specdec.core.writing import write_whole
from specdec.evaluation.display import require_matplotlib, save_figure

if TYPE_CHECKING:
    from targets.arch import Arch
    from targets.jax.estimate import Chip
    from targets.jax.report import Job

Row = dict[str, Any]


@Parameter(name="*", group="Program")
@dataclass(frozen=True)
class ProgramConfig:
    topology: str = "v6e:2x2x1"
    "The chips to compile for, as libtpu names them."
    tp: int = 4
    "Chips to split the model over."
    int8: bool = False
    "Linear layers in int8, per output channel; else bfloat16, like the head."
    int4: bool = False
    "Linear layers in int4, by groups of 32 inputs."
    kv_dtype: Literal["bfloat16", "int8"] = "bfloat16"
    "Data type of the KV cache."
    k: int = 7
    "Draft tokens per cycle; plain decoding runs at the width that holds them, too."
    batches: Whole = (1,)
    "Rows per step, as in 1,8,64."
    contexts: Whole = (512, 2048)
    "Tokens in each row's cache; the cache is exactly that long unless --max-len is given."
    max_len: int | None = None
    "Length of each row's cache in tokens."
    out: Path | None = None
    "Where to write the receipt (JSON)."
    plot: Path | None = None
    "Where to draw estimated step time and floor by context (PNG)."


def compile_report(
    model: str,
    /,
    *,
    config: ProgramConfig = ProgramConfig(),
    json: topics.Json = False,  # noqa: B008
) -> None:
    """Memory, bytes, operations and collectives of a step, counted in the compiled program, and
    its estimated time against what must be read. No weights are made, no TPU is needed: libtpu is.

    Parameters
    ----------
    model
        A public model's dimensions: gemma-4-e4b, gemma-4-31b, ...
    """
    from targets.arch import released
    from targets.jax.estimate import chip_of

    arch, chip = released(model), chip_of(config.topology)
    _refuse(config)
    jobs = _jobs(arch, chip, config)
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(config).items()}
    facts = {"architecture": model, "config": settings, "chip": asdict(chip)}
    document = run_record(config.topology, command="compile-report", **facts)
    document |= {"rows": [row for job, contexts in jobs for row in _rows(job, contexts)]}
    _print(document)
    if config.out is not None:
        write_whole(config.out, json_module.dumps(document, indent=1))
    if config.plot is not None:
        _plot(document, config.plot)
    if json:
        print_json(document)


def _jobs(arch: Arch, chip: Chip, config: ProgramConfig) -> list[tuple[Job, tuple[int, ...]]]:
    """The programs, each with the contexts to count it for. Raises UserError."""
    from targets.jax.aot import topology_mesh
    from targets.jax.load import KV_DTYPES, JaxOptions, make_plan
    from targets.jax.report import Job

    kind, contexts = KV_DTYPES[config.kv_dtype], config.contexts
    rooms = {c: (c,) for c in contexts} if config.max_len is None else {config.max_len: contexts}
    plans = [
        (make_plan(arch, JaxOptions(slots=batch, max_len=room, k=config.k, mapped=False)), filled)
        for batch in config.batches
        for room, filled in rooms.items()
    ]
    mesh = topology_mesh(config.topology, config.tp)
    narrow = "int4" if config.int4 else "int8" if config.int8 else None
    return [(Job(plan, mesh, chip, narrow, kind), filled) for plan, filled in plans]


def _refuse(config: ProgramConfig) -> None:
    """Raise UserError for invalid options, before anything is compiled."""
    if config.int8 and config.int4:
        raise UserError("--int8 and --int4 are two ways to quantise: leave one of them")
    for name in ("batches", "contexts"):
        if min(getattr(config, name), default=0) < 1:
            raise UserError(f"--{name} must be 1 or more")
    for name in ("out", "plot"):
        if (file := getattr(config, name)) is not None:
            check_file(file, f"--{name}")
    if config.max_len is not None and max(config.contexts) > config.max_len:
        raise UserError(f"--contexts: {max(config.contexts)} is more than --max-len has room for")
    if config.plot is not None:
        require_matplotlib()


def _rows(job: Job, contexts: tuple[int, ...]) -> list[Row]:
    from targets.jax.aot import DoesNotFit
    from targets.jax.report import report

    plan = job.plan
    with working(console, f"compiling batch {plan.slots}, room for {plan.max_len}"):
        try:
            return report(job, contexts)
        except DoesNotFit as problem:
            what = {"batch": plan.slots, "context": plan.max_len, "width": plan.width}
            return [what | {"kind": "does not fit", "why": str(problem)}]


def _print(document: Row) -> None:
    chips = f"{document['architecture']} on {document['config']['topology']}"
    rows = [row for row in document["rows"] if "bytes" in row]
    plain = [row for row in rows if row["kind"] == "plain"]
    print_table(f"{chips}: GB on a chip", plain, _MEMORY, console)
    print_table(f"{chips}: a step on a chip", _distinct(rows), _STEP, console)
    for row in document["rows"]:
        if "why" in row:
            console.print(f"batch {row['batch']}, context {row['context']:,}: {row['why']}")
    console.print(
        "[dim]GB: moved from and to HBM, counted in the compiled program; / need: over weights and "
        "filled K/V, shared out evenly; reduces, others: collectives a layer; ms: an estimate from "
        "the data sheet's rates, nothing was run; share: of it what must be read takes. A verify "
        "that is not shown is its plain step.[/dim]"
    )


def _distinct(rows: list[Row]) -> list[Row]:
    """Without verify steps that move what their plain step moves: plain comes right before."""
    kept: list[Row] = []
    for row in rows:
        if row["kind"] == "plain" or row["bytes"] != kept[-1]["bytes"]:
            kept.append(row)
    return kept


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f}"


def _per_layer(row: Row, reduces: bool) -> str:
    chosen = [one for one in row["collectives"] if (one["kind"] == "all-reduce") == reduces]
    return f"{sum(one['per_layer'] for one in chosen):g}"


_MEMORY: dict[str, Callable[[Row], str]] = {
    "B": lambda row: str(row["batch"]),
    "context": lambda row: f"{row['context']:,}",
    "weights": lambda row: _gb(row["memory"]["weights"]),
    "K/V": lambda row: _gb(row["memory"]["kv"]),
    "temporaries": lambda row: _gb(row["memory"]["temporaries"]),
    "results": lambda row: _gb(row["memory"]["results"]),
    "in all": lambda row: _gb(row["memory"]["total"]),
}
_STEP: dict[str, Callable[[Row], str]] = {
    "step": lambda row: row["kind"],
    "B": lambda row: str(row["batch"]),
    "context": lambda row: f"{row['context']:,}",
    "GB": lambda row: _gb(row["bytes"]),
    "/ need": lambda row: f"{row['bytes_over_needed']:.3f}",
    "TFLOP": lambda row: f"{row['flops'] / 1e12:.2f}",
    "reduces": lambda row: _per_layer(row, True),
    "others": lambda row: _per_layer(row, False),
    "ms": lambda row: f"{1e3 * row['estimate']['step']:.2f}",
    "share": lambda row: f"{row['share_of_floor']:.0%}",
}


def _plot(document: Row, path: Path) -> None:
    """A PNG: estimated step time, its parts and the floor, for each program that fits."""
    from matplotlib.figure import Figure

    rows = _distinct([row for row in document["rows"] if "bytes" in row])
    names = [f"{r['kind']}\nB {r['batch']}\n{r['context']:,}" for r in rows]
    figure = Figure(figsize=(2 + 1.1 * len(rows), 4.6), layout="constrained")
    axes = figure.subplots()
    work = [1e3 * max(r["estimate"]["memory"], r["estimate"]["compute"]) for r in rows]
    waits = [1e3 * r["estimate"]["collectives"] for r in rows]
    axes.bar(range(len(rows)), work, label="memory or matmuls, the longer")
    axes.bar(range(len(rows)), waits, bottom=work, label="collectives")
    floors = [1e3 * r["floor_seconds"] for r in rows]
    axes.hlines(floors, [i - 0.45 for i in range(len(rows))], [i + 0.45 for i in range(len(rows))])
    axes.plot([], [], color="black", label="floor: what must be read")
    axes.set(ylabel="ms per step, estimated", yscale="log")
    axes.set_xticks(range(len(rows)), names, fontsize="small")
    axes.legend(fontsize="small")
    figure.suptitle(f"{document['architecture']}, {document['config']['topology']}")
    save_figure(figure, path)
