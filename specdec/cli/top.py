"""`specdec top`: what a server is doing, live in a terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from specdec.cli.console import console, print_json
from specdec.cli.scraping import Reading, ServerFigures, as_json, figures_between, read_metrics
from specdec.core.errors import UserError

LONGEST = 86_400
"""Seconds of the longest interval: a day."""
WINDOW = 10
"""Intervals that figures are of: one alone would jump."""


def top(
    url: str = "http://127.0.0.1:8000",
    *,
    interval: float = 1.0,
    count: int = 0,
    json: bool = False,
) -> None:
    """Show a server's queue, slots, tau by drafter, speed and acceptance, until Ctrl-C.

    Parameters
    ----------
    url
        Of the server.
    interval
        Seconds between two readings of its /metrics. Figures are of the last ten.
    count
        End after so many; 0 is never.
    json
        End stdout with the last figures as one JSON document.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise UserError(f"the server's URL must begin with http:// or https://, got {url!r}")
    if not 0 < interval <= LONGEST:  # nor nan
        raise UserError(f"interval must be more than 0 and at most {LONGEST}, got {interval:g}")
    if count < 0:
        raise UserError(f"count must be 0 or more, got {count}")
    last: list[ServerFigures] = []
    try:
        _watch(url, interval, count, last.append)
    except KeyboardInterrupt:
        pass  # the way to end it
    if json and last:
        print_json(as_json(last[-1]))


def _watch(url: str, interval: float, count: int, note: Callable[[ServerFigures], None]) -> None:
    """Raises UserError where there was nothing to show."""
    readings = deque([read_metrics(url)], maxlen=WINDOW + 1)
    shown, figures, trouble = 0, None, None
    with _screen(url) as live:
        while not count or shown < count:
            time.sleep(interval)
            try:
                readings.append(read_metrics(url))
            except UserError as away:  # it may come back
                live.update(Text(str(away), style="red"), refresh=True)
                shown, trouble = shown + 1, away
                continue
            if _restarted(readings):
                readings = deque([readings[-1]], maxlen=WINDOW + 1)
                continue
            figures = figures_between(readings[0], readings[-1])
            note(figures)
            live.update(display(figures, url), refresh=True)
            shown += 1
    if trouble is not None and figures is None:
        raise trouble


@contextmanager
def _screen(url: str) -> Iterator[Live]:
    try:
        with Live(_waiting(url), console=console, auto_refresh=False) as live:
            yield live
    finally:
        if not console.is_terminal:
            console.line()  # rich ends the last line of terminals alone


def _restarted(readings: deque[Reading]) -> bool:
    """Whether counters fell."""
    name = "specdec:verify_passes_total"
    return len(readings) > 1 and readings[-1].sum(name) < readings[-2].sum(name)


def _waiting(url: str) -> Text:
    return Text(f"reading {url} …", style="dim")


def display(figures: ServerFigures, url: str) -> RenderableType:
    """The screen."""
    f = figures
    head = Text.assemble(
        (f"{f.model}", "bold"),
        f"  {url}",
        (f"   last {f.seconds:.0f} s, Ctrl-C ends", "dim"),
    )
    main = Table.grid(padding=(0, 3))
    for name, value in (
        ("requests", _requests(f)),
        ("slots", f"{f.running:.0f} of {f.slots:.0f} taken"),
        ("tau", _number(f.tau)),
        ("speed-up over plain", _number(f.speedup)),
        ("generated tok/s", _number(f.tokens_per_second, 1)),
        ("prompt tok/s", _number(f.prompt_tokens_per_second, 1)),
        ("prompts from the cache", "–" if f.cached is None else f"{f.cached:.0%}"),
        ("in the queue", _milliseconds(f.queue_ms)),
        ("first token", _milliseconds(f.first_token_ms)),
        ("between tokens", _milliseconds(f.between_tokens_ms)),
    ):
        main.add_row(name, Text(value, style="bold"))
    return Group(head, Text(), main, Text(), _by_drafter(f), _acceptance(f), _cycle(f))


def _requests(figures: ServerFigures) -> str:
    f = figures
    return f"{f.waiting:.0f} waiting, {f.prefilling:.0f} prefilling, {f.decoding:.0f} decoding"


def _by_drafter(figures: ServerFigures) -> RenderableType:
    """Tau of each drafter's drafts, and which share of the verify passes had them."""
    if not figures.tau_by_drafter:
        return Text()
    table = Table("drafter", "tau", "passes", "", box=None, padding=(0, 2), header_style="dim")
    for drafter, tau in figures.tau_by_drafter.items():
        share = figures.passes_by_drafter[drafter]
        bar = ProgressBar(total=1, completed=share, width=30)
        table.add_row(drafter, f"{tau:.2f}", bar, f"{share:.0%}")
    return table


def _acceptance(figures: ServerFigures) -> RenderableType:
    if not figures.acceptance:
        return Text("no guess was made", style="dim")
    table = Table("accepted", "position", "", "", box=None, padding=(0, 2), header_style="dim")
    for drafter, shares in figures.acceptance.items():
        for i, share in enumerate(shares):
            bar = ProgressBar(total=1, completed=share, width=30)
            table.add_row("" if i else drafter, str(i + 1), bar, f"{share:.0%}")
    return table


def _cycle(figures: ServerFigures) -> RenderableType:
    if not figures.cycle_ms:
        return Text()
    whole = sum(figures.cycle_ms.values())
    table = Table("a cycle", "", "", box=None, padding=(0, 2), header_style="dim")
    for part, ms in figures.cycle_ms.items():
        table.add_row(part, ProgressBar(total=whole, completed=ms, width=30), f"{ms:.2f} ms")
    table.add_row("together", "", f"{whole:.2f} ms per row and cycle")
    return table


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _milliseconds(quantiles: dict[str, float]) -> str:
    return ", ".join(f"{name} {ms:.1f} ms" for name, ms in quantiles.items()) or "–"
