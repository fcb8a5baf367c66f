"""An evaluation for people: tables on the screen, and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specdec.core.errors import UserError
from specdec.evaluation.results import Evaluation, Tau


def print_evaluation(evaluation: Evaluation, console: Console | None = None) -> None:
    """Tables of tau by category, acceptance by position, and speed; stderr by default."""
    console = console or Console(stderr=True)
    console.print(_tau_table(evaluation))
    if len(evaluation.contexts) > 1:
        console.print(_context_table(evaluation))
    console.print(_position_table(evaluation))
    console.print(_speed_table(evaluation))
    console.print(_equality_line(evaluation))
    console.print(f"distinct-4 {evaluation.distinct_4:.2f} (1 is never the same, 0 is a loop)")
    if evaluation.skipped:
        console.print(
            f"[yellow]prompts skipped because they are too long: {len(evaluation.skipped)}[/yellow]"
        )


HOW = "pip install '.[plots]' in specdec's clone, or pip install matplotlib"


def require_matplotlib() -> None:
    """Raise UserError where plots can't be drawn: before the work, not after it."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as missing:
        raise UserError(f"plots need matplotlib: {HOW}") from missing


def plot_evaluation(evaluation: Evaluation, path: str | Path) -> None:
    """Write a PNG: acceptance by position, accepted lengths, and tau with intervals by the text's
    length and by category."""
    require_matplotlib()
    from matplotlib.figure import Figure

    rows = [evaluation.overall, *evaluation.categories]
    figure = Figure(figsize=(18, max(3.6, 1.2 + 0.32 * len(rows))), layout="constrained")
    positions, lengths, contexts, categories = figure.subplots(1, 4)
    x = [p.index + 1 for p in evaluation.positions]
    positions.plot(x, [p.accepted for p in evaluation.positions], "o-", label="of all passes")
    conditional = [p.conditional for p in evaluation.positions]
    positions.plot(x, conditional, "s--", label="if the one before was accepted")
    positions.set(xlabel="draft position", ylabel="accepted", ylim=(0, 1.02), xticks=x)
    positions.legend()
    total = max(1, sum(evaluation.histogram))
    lengths.bar(range(len(evaluation.histogram)), [n / total for n in evaluation.histogram])
    lengths.set(xlabel="draft tokens accepted", ylabel="share of verify passes")
    spans = range(len(evaluation.contexts))
    contexts.vlines(
        spans,
        [c.low for c in evaluation.contexts],
        [c.high for c in evaluation.contexts],
        linewidth=3,
        alpha=0.4,
    )
    contexts.plot(spans, [c.tau for c in evaluation.contexts], "o")
    contexts.set(xlabel="length of the text, in tokens", ylabel="tau", xticks=list(spans))
    contexts.set_xticklabels([c.name for c in evaluation.contexts], rotation=30)
    y = range(len(rows))
    categories.hlines(y, [r.low for r in rows], [r.high for r in rows], linewidth=3, alpha=0.4)
    categories.plot([r.tau for r in rows], y, "o")
    categories.set(xlabel="tau, with bootstrap 95 % interval", yticks=list(y))
    categories.set_yticklabels([r.name for r in rows])
    categories.invert_yaxis()
    figure.suptitle(_title(evaluation))
    save_figure(figure, path)


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a PNG. Raises UserError where it can't be written."""
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as failure:
        raise UserError(f"can't write the plot to {path}: {failure}") from failure


def _title(evaluation: Evaluation) -> str:
    settings = evaluation.settings
    temperature = settings["sampling"]["temperature"]
    return f"drafter {settings['drafter']}, K = {settings['k']}, temperature {temperature:g}"


def _tau_table(evaluation: Evaluation) -> Table:
    table = Table(title=_title(evaluation))
    for column in ("category", "prompts", "tokens", "passes", "tau", "95 % interval", "accepted"):
        table.add_column(column, justify="left" if column == "category" else "right")
    # One category alone is the same as all.
    rows = evaluation.categories if len(evaluation.categories) > 1 else []
    for row in (*rows, evaluation.overall):
        table.add_row(*_tau_cells(row), style="bold" if row is evaluation.overall else None)
    return table


def _context_table(evaluation: Evaluation) -> Table:
    table = Table(title="acceptance by length of the text, in tokens")
    for column in ("length", "prompts", "tokens", "passes", "tau", "95 % interval", "accepted"):
        table.add_column(column, justify="left" if column == "length" else "right")
    for row in evaluation.contexts:
        table.add_row(*_tau_cells(row))
    return table


def _tau_cells(row: Tau) -> tuple[str, ...]:
    # One prompt can't be resampled: its interval would look certain.
    interval = f"{row.low:.2f} – {row.high:.2f}" if row.prompts > 1 else "one prompt"
    counts = (f"{row.prompts}", f"{row.tokens:,}", f"{row.cycles:,}")
    return (escape(row.name), *counts, f"{row.tau:.3f}", interval, f"{row.rate:.1%}")


def _position_table(evaluation: Evaluation) -> Table:
    table = Table(title="acceptance by draft position")
    for column in ("position", "proposed", "accepted", "if the one before was", "ended here"):
        table.add_column(column, justify="right")
    total = max(1, sum(evaluation.histogram))
    for position in evaluation.positions:
        table.add_row(
            str(position.index + 1),
            f"{position.proposed:.1%}",
            f"{position.accepted:.1%}",
            f"{position.conditional:.1%}",
            f"{evaluation.histogram[position.index] / total:.1%}",
        )
    return table


def _speed_table(evaluation: Evaluation) -> Table:
    title = "speed"
    if evaluation.speeds["plain"].tokens_per_second:
        ratios = f"decode x{evaluation.decode_ratio:.2f}, wall clock x{evaluation.wall_ratio:.2f}"
        title = f"speed: {ratios}"
    table = Table(title=title)
    for column in ("run", "decode tok/s", "decode s", "wall s"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for name, speed in evaluation.speeds.items():
        seconds = f"{speed.decode_seconds:.2f}", f"{speed.wall_seconds:.2f}"
        table.add_row(escape(name), f"{speed.tokens_per_second:,.1f}", *seconds)
    return table


def _equality_line(evaluation: Evaluation) -> str:
    equality = evaluation.equality
    if equality.equal:
        return f"[green]equal to plain decoding[/green], sha256 {equality.plain_sha256[:16]}"
    where = equality.first_difference or {}
    place = f"prompt {escape(str(where.get('prompt')))}, token {where.get('position')}"
    return f"[bold red]DIFFERS from plain decoding[/bold red], first at {place}"
