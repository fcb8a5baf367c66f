"""The signals that end a server: the first one drains it, the second one ends it at once."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import NoReturn

from specdec.core.first_process import end_by_default

ENDING = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """A queue of received signals of ENDING. After `most` of them the default handlers are
    restored: the next one kills the process."""

    def __init__(self, most: int) -> None:
        # its `put`, unlike an event's `set`, may interrupt a `get` of the same thread
        self._came: SimpleQueue[int] = SimpleQueue()
        self._left = most

    def take(self, timeout: float) -> int | None:
        """The next signal, waiting up to `timeout` seconds; None if none comes."""
        try:
            return self._came.get(timeout=timeout)
        except Empty:
            return None

    def _handle(self, number: int, frame: object) -> None:
        self._left -= 1
        if not self._left:
            for one in ENDING:
                end_by_default(one)
        self._came.put(number)


@contextmanager
def signals_heard(most: int = 2) -> Iterator[Signals]:
    """Queue the signals instead of their default action. Only in the main thread."""
    signals = Signals(most)
    before = {number: signal.signal(number, signals._handle) for number in ENDING}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_by(number: int) -> NoReturn:
    """End the process by the signal's default action, as its parent expects."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.stdout.flush()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    sys.exit(128 + number)  # process 1 of a container, which such signals leave alone
