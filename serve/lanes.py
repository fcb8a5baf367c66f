"""Threads for requests before the engine has them: parsing, rendering, encoding. Small requests
have threads of their own, so that none waits for a larger one."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import ParamSpec, TypeVar

from serve.errors import ApiError
from targets.chat_template import abandoned_when

SMALL_BYTES = 8 << 10
"""A body of up to so many bytes is small: it is parsed and encoded in milliseconds."""
MEDIUM_BYTES = 64 << 10
"""One of up to so many is parsed in a millisecond too, but encoding it can take 100."""
SMALL_THREADS = 4
MEDIUM_THREADS = 4
"""At most: it is half of the machine's cores, for on a CPU the model computes on them too."""
LARGE_THREADS = 1
"""Large requests are prepared one by one: each takes memory, and time of a core."""
PICTURE_THREADS = 4
"""Pictures are fetched and decoded beside the others: a large one takes a second."""
LARGE_WAITING = 8
"""Large bodies in memory at once, the one in work included."""
LARGE_OF_A_KEY = 6
"""Of these, those that one API key may send at once: however slowly they come, others have room."""
SMALL_WAITING = 1024
MEDIUM_WAITING = 512
"""Requests of these lanes that wait or are in work: more than an engine's queue takes by default,
so that a burst of honest ones is refused there, if at all."""
RETRY_SECONDS = 2
P = ParamSpec("P")
Made = TypeVar("Made")


class Lanes:
    """Its methods belong to one asyncio loop."""

    def __init__(self) -> None:
        medium = max(1, min(MEDIUM_THREADS, (os.cpu_count() or 1) // 2))
        self._small = ThreadPoolExecutor(SMALL_THREADS, "specdec-small")
        self._medium = ThreadPoolExecutor(medium, "specdec-medium")
        self._large = ThreadPoolExecutor(LARGE_THREADS, "specdec-large")
        self._pictures = ThreadPoolExecutor(PICTURE_THREADS, "specdec-pictures")
        self._admitted = 0
        self._sending: Counter[str] = Counter()  # large bodies by API key
        self._waiting: Counter[ThreadPoolExecutor] = Counter()

    @contextmanager
    def admitted(self, size: int | None, key: str = "") -> Iterator[None]:
        """Around reading a body of so many bytes, None where the client did not declare them. key:
        the API key's number, where there are keys. Raises ApiError 429 where too many large ones
        are here already."""
        large = size is None or size > MEDIUM_BYTES
        if large and self._admitted >= LARGE_WAITING:
            raise _full(f"{self._admitted} large requests")
        if large and key and self._sending[key] >= LARGE_OF_A_KEY:
            raise _full(f"{self._sending[key]} large requests of this API key")
        self._admitted += large
        self._sending[key] += large
        try:
            yield
        finally:
            self._admitted -= large
            self._sending[key] -= large

    async def prepare(
        self, size: int, make: Callable[P, Made], *args: P.args, **kwargs: P.kwargs
    ) -> Made:
        """`run`, counted like a body that is being read; smaller ones are counted here alone, as
        their bodies take no room. Raises ApiError 429."""
        with self.admitted(size), self._queued(size):
            return await self.run(size, make, *args, **kwargs)

    async def translate(
        self, size: int, make: Callable[P, Made], *args: P.args, **kwargs: P.kwargs
    ) -> Made:
        """`make`, which is quick for a body of up to MEDIUM_BYTES: here, or as `prepare` for a
        larger one. Raises ApiError 429."""
        if size <= MEDIUM_BYTES:
            return make(*args, **kwargs)
        return await self.prepare(size, make, *args, **kwargs)

    async def prepare_pictures(
        self, make: Callable[P, Made], *args: P.args, **kwargs: P.kwargs
    ) -> Made:
        """`make`, which decodes pictures, counted like a large body. Raises ApiError 429."""
        with self.admitted(None):
            return await _on(self._pictures, partial(make, *args, **kwargs))

    async def run(
        self, size: int, make: Callable[P, Made], *args: P.args, **kwargs: P.kwargs
    ) -> Made:
        """`make` on a thread of its lane. size: of the request's body, in bytes."""
        return await _on(self._lane(size), partial(make, *args, **kwargs))

    @contextmanager
    def _queued(self, size: int) -> Iterator[None]:
        lane, most = self._lane(size), SMALL_WAITING if size <= SMALL_BYTES else MEDIUM_WAITING
        if self._waiting[lane] >= most:
            raise _full(f"{self._waiting[lane]} requests")
        self._waiting[lane] += 1
        try:
            yield
        finally:
            self._waiting[lane] -= 1

    def _lane(self, size: int) -> ThreadPoolExecutor:
        if size <= SMALL_BYTES:
            return self._small
        return self._medium if size <= MEDIUM_BYTES else self._large


async def _on(threads: ThreadPoolExecutor, work: Callable[[], Made]) -> Made:
    """`work` on one of the threads. If this coroutine is cancelled, its rendering ends soon: the
    thread is for others."""
    left = threading.Event()

    def until_left() -> Made:
        with abandoned_when(left.is_set):
            return work()

    try:
        return await asyncio.get_running_loop().run_in_executor(threads, until_left)
    except asyncio.CancelledError:
        left.set()
        raise


def _full(what: str) -> ApiError:
    return ApiError(
        429,
        f"{what} are being read already: retry in a moment",
        code="queue_full",
        headers={"Retry-After": str(RETRY_SECONDS)},
    )
