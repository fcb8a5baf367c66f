"""The web server, in a thread of its own, so that the main thread can load a model and handle
signals."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import uvicorn
from fastapi import FastAPI

from serve.connections import BoundedProtocol, log_loop_failure
from serve.lifecycle import Lifecycle
from serve.loading_app import LoadingApp
from serve.policy import AccessPolicy
from serve.request_log import RequestLog
from serve.traces import Around

LAST_WORDS = 5.0
"""Seconds for the last error events to be sent at shutdown."""
IDLE_SECONDS = 75
"""Time after which an idle connection is closed. It must be longer than clients keep theirs (httpx:
5 s): a connection closed just as a request arrives looks to the client like a dead server."""
TICK = 0.05
EVENT_LOOP = "auto"
"""uvicorn's choice: uvloop, or asyncio where there is none. A streamed token costs a sixth less on
uvloop."""
THREAD_TURN = 0.0005
"""Seconds after which a thread that computes in Python hands over to one that waits; Python's own
are ten times as many. A step of the engine may take 5 ms, so its thread can't wait that long for
the event loop. E4B with 64 users on an H200: 7,442 tokens/s with Python's, 7,938 with this."""
ANYBODY = AccessPolicy()


def _patient(seconds: float) -> bool:
    time.sleep(seconds)
    return False


class Server:
    """Serves `listener` from `__enter__` to `__exit__`; `open` adds the app with the engine."""

    def __init__(
        self,
        listener: socket.socket,
        lifecycle: Lifecycle,
        policy: AccessPolicy = ANYBODY,
        around: Around = lambda app: app,
    ) -> None:
        """around: adds further middleware to the app (`serve.traces`)."""
        self._lifecycle, self._listener = lifecycle, listener
        self._loading_app = LoadingApp(lifecycle)
        config = uvicorn.Config(
            RequestLog(around(policy.around(self._loading_app))),
            http=BoundedProtocol,
            loop=EVENT_LOOP,
            ws="none",
            lifespan="off",  # it begins later, when the model is there
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=IDLE_SECONDS,
        )
        self._uvicorn = _Uvicorn(config)
        self._thread = threading.Thread(target=self._run, name="specdec-web", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def __enter__(self) -> Server:
        sys.setswitchinterval(THREAD_TURN)
        self._thread.start()
        self._uvicorn.up.wait()
        return self

    def __exit__(self, *_: object) -> None:
        if self.alive:
            self._in_loop(self._loading_app.close())
        self._uvicorn.should_exit = True
        self._thread.join()

    def open(self, app: FastAPI) -> None:
        """Serve `app`, which must have been made with this server's lifecycle, from now on."""
        self._in_loop(self._loading_app.open(app))

    def drain(self, seconds: float, hurried: Callable[[float], bool]) -> bool:
        """Refuse new requests and wait until the running ones have ended; those that still run
        after `seconds` end with an error event. Returns whether the engine has ended too.

        hurried: waits for the given seconds and returns whether to stop waiting.
        """
        self._lifecycle.draining = True
        runner = self._lifecycle.runner
        assert runner is not None
        if not self._idle(seconds, hurried):
            runner.close(LAST_WORDS)
            if not self._idle(LAST_WORDS):
                self._uvicorn.loop.call_soon_threadsafe(self._hang_up)
                self._idle(LAST_WORDS)
        runner.close(LAST_WORDS)
        return not runner.alive

    def finish_answers(self) -> None:
        """Wait until the last error events of a failed engine are sent, or LAST_WORDS."""
        self._idle(LAST_WORDS)

    def _idle(self, seconds: float, hurried: Callable[[float], bool] = _patient) -> bool:
        """Wait up to `seconds` until no request is in flight; returns whether none is."""
        ends = time.monotonic() + seconds  # which may be infinite
        while self._loading_app.in_flight and time.monotonic() < ends:
            if hurried(TICK):
                break
        return not self._loading_app.in_flight

    def _hang_up(self) -> None:
        """Abort the connections of clients that don't read: they can't receive an error event, and
        uvicorn would cancel each with a traceback."""
        for connection in list(self._uvicorn.server_state.connections):
            connection.transport.abort()

    def _in_loop(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._uvicorn.loop).result()

    def _run(self) -> None:
        try:
            self._uvicorn.run(sockets=[self._listener])
        finally:
            self._uvicorn.up.set()  # also where it never came up


class _Uvicorn(uvicorn.Server):
    """uvicorn's server; `up` is set once it serves, and `loop` is its asyncio loop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = threading.Event()
        self.loop: asyncio.AbstractEventLoop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(log_loop_failure())
        self.up.set()
