"""Where a server's log goes: stderr, a line each."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

LogLevel = Literal["debug", "info", "warning", "error"]
FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@contextmanager
def logged(level: LogLevel) -> Iterator[None]:
    """Print what this package logs, and the web server's warnings."""
    ours, web = logging.getLogger("specdec"), logging.getLogger("uvicorn")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(FORM))
    before = ours.level, web.level
    ours.setLevel(level.upper())
    web.setLevel(max(logging.WARNING, ours.level))
    for logger in (ours, web):
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, its in zip((ours, web), before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(its)
