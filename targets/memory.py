"""Memory plans: what a model needs by its context, and the context that fits by default."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MOST_CONTEXT = 65_536
"""Tokens: the largest default context."""
STEP = 1024
"""Tokens: default contexts below a model's limit are multiples of it."""
PREFIX_SHARE = 4
"""A default context leaves 1/PREFIX_SHARE of the memory beside the weights to the prefix cache."""
GIB = 1 << 30
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Need:
    """Bytes."""

    weights: int
    cache: int
    workspace: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.workspace

    def __str__(self) -> str:
        parts = f"weights {gib(self.weights)}, K/V cache {gib(self.cache)}, workspace "
        return f"{gib(self.total)} ({parts}{gib(self.workspace)})"


def gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def default_context(limit: int, free: int | None, need: Callable[[int], Need]) -> int:
    """Tokens per sequence. limit: the model's own. free: bytes; None where they are not known.
    need: by context. What does not fit at all is left to the check of the memory plan."""
    most = min(limit, MOST_CONTEXT)
    if free is None:
        return most

    def leaves_room(context: int) -> bool:
        needed = need(context)
        beside = free - needed.weights
        return needed.total - needed.weights <= beside - beside // PREFIX_SHARE

    if leaves_room(most):
        return most
    steps = largest(lambda n: leaves_room(n * STEP), most // STEP)
    return steps * STEP or min(most, STEP)


def largest(fits: Callable[[int], bool], top: int) -> int:
    """The largest n in [1, top] that fits, where fitting only gets harder; 0 if none does."""
    low, high = 0, top
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def host_free() -> int | None:
    """Bytes of the machine's memory that a process can still take; None where the system does not
    report it. A container's limit counts (cgroup v2)."""
    free = _available()
    limit, used = _number(CGROUP / "memory.max"), _number(CGROUP / "memory.current")
    if limit is None or used is None:
        return free
    left = max(0, limit - used + _pages_of_files())
    return left if free is None else min(free, left)


def host_total() -> int:
    """Bytes of the machine's memory, or those that its container may take where that is less."""
    limit = _number(CGROUP / "memory.max")
    return _whole() if limit is None else min(_whole(), limit)


def _whole() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _pages_of_files() -> int:
    """Bytes of files that were read, weights too: a container's use counts them, but they go where
    memory is short."""
    try:
        lines = (CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    pairs = (line.split() for line in lines)
    return sum(int(size) for name, size in pairs if name in ("active_file", "inactive_file"))


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return _whole() // 2
    found = (line.split() for line in lines if line.startswith("MemAvailable:"))
    return next((int(number) * 1024 for _, number, _ in found), None)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None
