"""The speed of training steps alone, whatever is done between them."""

from __future__ import annotations

import time


class Pace:
    """Measures from a mark: the start, or where a row was logged or something else was done."""

    def __init__(self, step: int) -> None:
        self.mark(step)

    def mark(self, step: int) -> None:
        """All up to this step is done, and the device waits."""
        self._step, self._since = step, time.monotonic()

    def tokens_per_second(self, step: int, tokens: int) -> float:
        """Of the steps since the mark, each of so many tokens."""
        return (step - self._step) * tokens / (time.monotonic() - self._since)
