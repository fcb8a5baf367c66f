"""Connections that can't be held for ever: by a request that never ends, or an answer that nobody
reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

ARRIVAL_SECONDS = 60.0
"""For a whole request to arrive, from the connection's first byte or the one before."""
STALL_SECONDS = 120.0
"""For a client to read on. uvicorn keeps 64 KiB of an answer that isn't read, and what follows
waits for it; tokens that the engine has already chosen wait too, no more than max_tokens."""


class BoundedProtocol(H11Protocol):
    """uvicorn's connection, closed where it comes to nothing. Between requests uvicorn itself
    closes it, after `timeout_keep_alive`."""

    _late: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
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
