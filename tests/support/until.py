"""Waiting for what another thread does."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 30.0
"""Seconds."""


def until(done: Callable[[], bool]) -> None:
    """Fails where it isn't so within PATIENCE."""
    deadline = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)
