"""Where a server's log goes: stderr, a line each."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

LogLevel = Literal["debug", "info", "warning", "error"]
FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"
CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class OneLine(logging.Formatter):
    """Writes a message on one line, whatever a client put into it: no client writes lines of its
    own, nor moves a terminal's cursor. A traceback follows on lines of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return CONTROLS.sub(lambda found: repr(found[0])[1:-1], super().formatMessage(record))


@contextmanager
def logged(level: LogLevel) -> Iterator[None]:
    """Print what this package logs, and the web server's warnings."""
    ours, web = logging.getLogger("specdec"), logging.getLogger("uvicorn")
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine(FORM))
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
