"""Requests with a grammar that has no verdict yet wait here for a trial, apart from all others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from serve.errors import ApiError
from specdec.constraints.trial import PROCESSES, Cancellation, cancellable

PER_CALLER = 8
"""Requests of one caller that wait for a trial or are in one."""
RETRY_SECONDS = 3
"""As long as one trial may take."""
Made = TypeVar("Made")


class GrammarQueue:
    """Threads for trials, and a bounded queue in front of them. Its methods belong to one asyncio
    loop."""

    def __init__(self, room: Callable[[], int]) -> None:
        """room: how many more requests may wait, by --max-waiting."""
        self._room = room
        self._threads = ThreadPoolExecutor(PROCESSES, "specdec-grammars")
        self._permits = asyncio.Semaphore(PROCESSES)
        self._by_caller: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        """Requests that wait for a trial or are in one."""
        return self._by_caller.total()

    async def run(self, caller: str, make: Callable[[], Made]) -> Made:
        """`make` on a thread of its own, its trial stopped if this coroutine is cancelled. Raises
        ApiError 429 where too many wait."""
        with self._counted(caller):
            async with self._permits:
                return await self._on_thread(make)

    async def _on_thread(self, make: Callable[[], Made]) -> Made:
        cancellation = Cancellation()

        def cancellable_make() -> Made:
            with cancellable(cancellation):
                return make()

        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, cancellable_make)
        except asyncio.CancelledError:
            cancellation.cancel()
            raise

    @contextmanager
    def _counted(self, caller: str):
        own = self._by_caller[caller]
        if own >= PER_CALLER or self.waiting >= max(1, self._room()):
            held = f"{own} of this caller's" if own >= PER_CALLER else f"{self.waiting}"
            raise ApiError(
                429,
                f"{held} requests already wait for their grammars to be compiled: retry in a "
                "moment, or send a schema that was used before",
                code="queue_full",
                headers={"Retry-After": str(RETRY_SECONDS)},
            )
        self._by_caller[caller] += 1
        try:
            yield
        finally:
            self._by_caller[caller] -= 1
            if not self._by_caller[caller]:
                del self._by_caller[caller]
