"""Connections that can't be held for ever: by a request that never ends, or an answer that nobody
reads. And no more of them than the server can hold."""

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
"""For a whole request to arrive, from the connection's first byte or the one before."""
STALL_SECONDS = 120.0
"""For a client to read on. uvicorn keeps 64 KiB of an answer that isn't read, and what follows
waits for it; tokens that the engine has already chosen wait too, no more than max_tokens."""

CONNECTIONS = 4096
"""Most connections from which requests are taken, where there are descriptors for so many."""
RESERVED_DESCRIPTORS = 256
"""For all else that the process opens: files, devices, pipes."""
SPARE_CONNECTIONS = 64
"""Further ones, on which each request gets a 503. What is beyond is closed."""
CROWDED = "crowded"
"""In a request's state: its connection is one too many."""
SELDOM_SECONDS = 60.0
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""What a system says that has nothing left to accept a connection with."""
log = logging.getLogger("specdec.serve")


def most_connections() -> int:
    """By CONNECTIONS, and by the process's limit of open files."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return CONNECTIONS
    return max(1, min(CONNECTIONS, soft - RESERVED_DESCRIPTORS))


class Seldom:
    """A complaint that is logged once, and again where it comes after SELDOM_SECONDS of silence."""

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
    """uvicorn's connection, closed where it comes to nothing. Between requests uvicorn itself
    closes it, after `timeout_keep_alive`."""

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
