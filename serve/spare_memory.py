"""Memory that the C library keeps after requests have freed it: given back to the system.

Large bodies, grammars and long prompts pass through many threads, each with an arena of its own,
and glibc returns of an arena what lies at its end alone. `malloc_trim` returns all whole pages.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

SECONDS = 10.0
"""Between two looks at the process's size."""
GROWN = 32 << 20
"""Bytes that it has grown by, since memory was last given back, for it to be given back again."""
STATM = Path("/proc/self/statm")
"""Linux: sizes of the process in pages, the second one of what is in memory."""


class SpareMemory:
    def __init__(self, size: Callable[[], int], give_back: Callable[[], object]) -> None:
        """size: bytes of the process in memory. give_back: on a thread; it takes milliseconds."""
        self._size, self._give_back = size, give_back
        self._least = size()

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(SECONDS)
            await self.check()

    async def check(self) -> None:
        self._least = min(self._least, size := self._size())
        if size - self._least >= GROWN:
            await asyncio.to_thread(self._give_back)
            self._least = self._size()


@asynccontextmanager
async def given_back() -> AsyncIterator[None]:
    """While the block runs, what this process does not use goes back to the system."""
    spare = of_this_process()
    watching = spare and asyncio.create_task(spare.watch())
    try:
        yield
    finally:
        if watching:
            watching.cancel()


def of_this_process() -> SpareMemory | None:
    """None where there is no glibc."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None
    return SpareMemory(resident, lambda: trim(0)) if STATM.exists() else None


def resident() -> int:
    """Bytes of this process in memory."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
