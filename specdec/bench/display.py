"""A bench's receipt for people: tables on the screen, and a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specdec.evaluation.display import require_matplotlib, save_figure

Row = dict[str, Any]

CLOCKS = ("clocks.sm", "clocks.max.sm")
"""nvidia-smi's names of a GPU's clock and of the highest one, in MHz."""
POWERS = ("power.draw", "power.limit")
"""nvidia-smi's names of a GPU's power and of its limit, in W."""
LIMITED = 0.97
"""Share of the limit of power from which a GPU counts as slowed by it, if its clock is low too."""
SLOWED = 0.98
"""Share of the highest clock below which a GPU's clock counts as low."""


def print_bench(document: Row, console: Console) -> None:
    """The receipt's tables; one that has no rows is left out."""
    bandwidth = document["read_bandwidth"] / 1e9
    console.print(f"measured read bandwidth [bold]{bandwidth:,.0f} GB/s[/bold]")
    columns = {
        "B": _plain("batch"),
        "context": _plain("context"),
        "T": _plain("width"),
        "step": lambda row: _ms(row["seconds"]),
        "spread": lambda row: _percent(row["spread"]),
        "share": lambda row: _percent(row["bandwidth_share"]),
        "forward": lambda row: _ms(row["forward"]["seconds"]) if "forward" in row else "",
        "its share": lambda row: _percent(row["forward_share"]) if "forward" in row else "",
        "/ plain": lambda row: f"{row['over_plain']:.3f}" if "over_plain" in row else "",
    }
    print_table(
        "ms per host-driven step, and of its forward alone", document["steps"], columns, console
    )
    columns = {
        "drafter": _plain("drafter"),
        "K": _plain("k"),
        "loop": _plain("loop"),
        "B": _plain("batch"),
        "context": _plain("context"),
        "cycle": lambda row: _ms(row["seconds"]),
        "spread": lambda row: _percent(row["spread"]),
        "overhead": lambda row: _ms(row["overhead"]) if "overhead" in row else "",
        "tok/s, tau 1": lambda row: f"{row['tokens_per_second_at_tau_1']:,.1f}",
    }
    print_table("ms per cycle, as the engine drives it", document["cycles"], columns, console)
    columns = {
        "prompt": _plain("prompt_length"),
        "ms": lambda row: _ms(row["seconds"]),
        "spread": lambda row: _percent(row["spread"]),
    }
    print_table("time to first token", document["first_token"], columns, console)
    for kind, title in (("runs", "end to end"), ("synthetic", "synthetic acceptance")):
        print_table(title, document[kind], _RUN, console)
    _print_gpus(document["gpus"][-1], console)
    console.print("outputs equal" if document["equal"] else "[bold red]OUTPUTS DIFFER[/bold red]")


def _print_gpus(gpus: list[dict[str, str]], console: Console) -> None:
    """How fast and how warm each GPU was after the last run. At its limit of power it lowers its
    clock, sooner or later by card: two runs compare only where neither was there."""
    for gpu in gpus:
        clock, power = (f"{gpu.get(a)} of {gpu.get(b)}" for a, b in (CLOCKS, POWERS))
        warmth = f"{gpu.get('temperature.gpu')} °C"
        console.print(
            f"{gpu['name']}, after the last run: {clock}, {power}, {warmth}", markup=False
        )
        if _share(gpu, POWERS) >= LIMITED and _share(gpu, CLOCKS) < SLOWED:
            console.print("[yellow]it is at its limit of power, which lowers its clock[/yellow]")


def _share(gpu: dict[str, str], of: tuple[str, str]) -> float:
    """Of two facts such as "650.12 W"; NaN where one is not known."""
    try:
        part, whole = (float(gpu[name].split()[0]) for name in of)
        return part / whole
    except (KeyError, IndexError, ValueError, ZeroDivisionError):
        return math.nan


def print_script(document: Row, console: Console) -> None:
    """The receipt of a script."""
    columns = {
        "drafter": lambda row: row["drafter"] + (", predicted" if row["predicted"] else ""),
        "K": _plain("k"),
        "loop": _plain("loop"),
        "B": _plain("batch"),
        "tok/s": lambda row: f"{row['tokens_per_second']:,.1f}",
        "spread": lambda row: _percent(row["spread"]),
        "tau": lambda row: f"{row['tau']:.3f}",
        "/ plain": lambda row: f"{row['over_plain']:.3f}",
    }
    print_table(f"{document['requests']} scripted answers", document["script"], columns, console)
    _print_gpus(document["gpus"][-1], console)
    verdict = (
        "all answers equal the script"
        if document["equal"]
        else "[bold red]ANSWERS DIFFER FROM THE SCRIPT[/bold red]"
    )
    console.print(verdict)


def print_policy(report: Row, console: Console) -> None:
    """The choices of `auto`, and estimates for each drafter alone (`core.policy.report`)."""
    chosen = report["chosen"]
    all_rows = sum(chosen.values()) or 1
    shares = ", ".join(f"{name} {count / all_rows:.0%}" for name, count in sorted(chosen.items()))
    console.print(f"rows by source of their draft: {shares or 'none yet'}", markup=False)
    costs: dict[str, Callable[[Row], str]] = {
        "rows": _plain("rows"),
        "verified": _plain("depth"),
        "guesses by weights": _plain("drafted"),
        "tokens of texts": _plain("context"),
        "ms": lambda row: _ms(row["seconds"]),
    }
    print_table("what cycles cost", report["seconds"], costs, console)
    columns: dict[str, Callable[[Row], str]] = {
        "drafter": _plain("drafter"),
        "K": _plain("k"),
        "tau": lambda row: f"{row['tau']:.2f}",
        "tok/s": lambda row: f"{row['tokens_per_second']:,.1f}",
    }
    print_table("had one drafter guessed alone", report["what_if"], columns, console)


def plot_bench(document: Row, path: str | Path) -> None:
    """Write a PNG: the share of the measured bandwidth by batch and by context."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    by_batch, by_context = figure.subplots(1, 2, sharey=True)
    points = list(_points(document["steps"]))
    _lines(by_batch, points, "batch", "context")
    _lines(by_context, points, "context", "batch")
    by_batch.set_ylabel("share of the measured read bandwidth")
    figure.suptitle(
        f"{document['architecture']}: bytes that a step must read / its time / "
        f"{document['read_bandwidth'] / 1e12:.2f} TB/s"
    )
    save_figure(figure, path)


def _points(steps: Iterable[Row]) -> Iterable[Row]:
    """The device's own share where it is known, the host-driven step's elsewhere."""
    for row in steps:
        yield row | {"share": row.get("forward_share", row["bandwidth_share"])}


def _lines(axes: Any, points: list[Row], along: str, other: str) -> None:
    """A line per width and value of the other axis."""
    for width, fixed in sorted({(p["width"], p[other]) for p in points}):
        line = [p for p in points if (p["width"], p[other]) == (width, fixed)]
        line.sort(key=lambda p: p[along])
        style = "o-" if width == 1 else "s--"
        shares = [p["share"] for p in line]
        axes.plot([p[along] for p in line], shares, style, label=f"width {width}, {other} {fixed}")
    axes.set(xlabel=along, xscale="log", ylim=(0, 1.05))
    ticks = sorted({p[along] for p in points})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.legend(fontsize="small")


def print_table(
    title: str, rows: list[Row], columns: dict[str, Callable[[Row], str]], console: Console
) -> None:
    """A table with these columns; nothing where there are no rows."""
    if not rows:
        return
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(escape(cell(row)) for cell in columns.values()))
    console.print(table)


def _plain(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row[name]:,}" if isinstance(row[name], int) else str(row[name])


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3f}"


def _percent(share: float) -> str:
    return f"{share:.1%}"


_RUN: dict[str, Callable[[Row], str]] = {
    "run": _plain("name"),
    "tok/s": lambda row: f"{row['tokens_per_second']:,.1f}",
    "spread": lambda row: _percent(row["spread"]),
    "tau": lambda row: f"{row['tau']:.2f}",
}
