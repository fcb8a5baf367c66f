"""Calls a function periodically while long work goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY = 10.0
"""Seconds between lines in a log."""


@contextmanager
def ticking(tell: Callable[[], None], every: float = EVERY) -> Iterator[None]:
    """Call a function every `every` seconds, from a thread, until the block ends."""
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(every):
            tell()

    teller = threading.Thread(target=tick, daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
