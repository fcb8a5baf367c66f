"""Progress of long work: a bar or a spinner on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specdec.core.ticking import EVERY, ticking

SHARE = 0.1
"""Share of the work after which the next line is printed without a terminal, if that is earlier
than EVERY seconds."""
AT_LEAST = 1.0
"""Seconds between two lines at least."""


class Bar:
    """Counts what is done of `total`. Use it as a context."""

    def __init__(
        self,
        console: Console,
        title: str,
        total: int,
        done: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._title, self._total, self._done = console, title, total, done
        self._clock, self._shown, self._when = clock, done, clock()
        columns = TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(*columns, TextColumn("{task.fields[note]}"), console=console)
            self._task = self._bar.add_task("", total=total, completed=done, note="")

    def __enter__(self) -> Bar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int = 1, note: str = "") -> None:
        self.update(self._done + count, note)

    def update(self, done: int, note: str = "", total: int | None = None) -> None:
        """done: of all, from the beginning; total: where it is known better by now."""
        self._done, self._total = done, total or self._total
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=self._total, note=note)
            return
        waited = self._clock() - self._when
        much = done - self._shown >= SHARE * self._total and waited >= AT_LEAST
        if much or waited >= EVERY:
            self._shown, self._when = done, self._clock()
            tail = f", {note}" if note else ""
            self._console.print(f"{self._title}: {done} of {self._total}{tail}", markup=False)


@contextmanager
def working(console: Console, what: str) -> Iterator[None]:
    """For work that can't be counted: a spinner, or a line every EVERY seconds."""
    if console.is_terminal:
        with console.status(what):
            yield
        return
    began = time.monotonic()

    def tell() -> None:
        console.print(f"{what}: {time.monotonic() - began:.0f} s", markup=False)

    with ticking(tell, EVERY):
        yield


def continues(console: Console, what: str, done: int, total: int) -> None:
    """Print where a run is resumed; nothing for a new one."""
    if done:
        console.print(f"continues at {what} {done} of {total}", markup=False)
