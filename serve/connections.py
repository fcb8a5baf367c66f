"""Limits of connections: a connection is closed if its request does not arrive in time or its
client stops reading, and the number of connections is bounded."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import time
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

ARRIVAL_SECONDS = 60.0
"""Time limit for a whole request to arrive, counted from the opening of the connection, or from the
first byte of a later request."""
STALL_SECONDS = 120.0
"""Time limit for a client that has stopped reading. uvicorn buffers 64 KiB of an unread answer and
pauses the rest; tokens that the engine has already chosen are queued, at most max_tokens."""

CONNECTIONS = 4096
"""Most connections that are served, if the process may open that many files."""
RESERVED_DESCRIPTORS = 256
"""File descriptors kept free for everything else: files, devices, pipes."""
SPARE_CONNECTIONS = 64
"""Connections beyond the limit: their requests are answered 503. Any further one is closed."""
CROWDED = "crowded"
"""Key in a request's state if its connection is beyond the limit; the value is the limit."""
SELDOM_SECONDS = 60.0
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Error numbers of `accept` when the system has no descriptors or memory left."""
log = logging.getLogger("specdec.serve")


def most_connections() -> int:
    """CONNECTIONS, or fewer if the process's limit of open files is lower."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return CONNECTIONS
    return max(1, min(CONNECTIONS, soft - RESERVED_DESCRIPTORS))


class Seldom:
    """Logs an error once, and again if it recurs after SELDOM_SECONDS without one."""

    def __init__(self) -> None:
        self._last = -SELDOM_SECONDS

    def log(self, message: str, *values: object) -> None:
        now = time.monotonic()
        if now - self._last >= SELDOM_SECONDS:
            log.error(message, *values)
        self._last = now


def log_loop_failure() -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """An event loop's exception handler. The loop would log exhausted descriptors, with a
    traceback, for each time that it tries to accept: some thousand times a second."""
    seldom = Seldom()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        problem = context.get("exception")
        if not isinstance(problem, OSError) or problem.errno not in EXHAUSTED:
            loop.default_exception_handler(context)
            return
        seldom.log(
            "no connection can be accepted (%s): allow the process more open files (ulimit -n)",
            problem.strerror,
        )

    return handle


class BoundedProtocol(H11Protocol):
    """uvicorn's connection, closed after ARRIVAL_SECONDS or STALL_SECONDS. Between requests uvicorn
    itself closes it, after `timeout_keep_alive`."""

    _refused = Seldom()
    _late: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        count, most = len(self.connections), most_connections()
        if count > most + SPARE_CONNECTIONS:
            self._refused.log("%d connections are open: further ones are closed", most)
            transport.abort()
        elif count > most:
            self.app_state = {**self.app_state, CROWDED: most}
        self._watch_arrival()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_arrival()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck = self._stuck or self._after(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stuck = _cancelled(self._stuck)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._late, self._stuck = _cancelled(self._late), _cancelled(self._stuck)

    def _watch_arrival(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._late = _cancelled(self._late)
        elif self._late is None:
            self._late = self._after(ARRIVAL_SECONDS, self.transport.close)

    def _after(self, seconds: float, what: Callable[[], None]) -> asyncio.TimerHandle:
        return self.loop.call_later(seconds, what)


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
