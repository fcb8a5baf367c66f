"""JAX's persistent cache of compiled programs: where it lies, and how much it was worth.

A program is found again by its text, the options and versions of the compiler, and the device;
its arithmetic is what was compiled once, so a warm start is also the same start.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from specdec.core.errors import UserError
from specdec.core.kept import kept_folder

log = logging.getLogger("specdec.cache")
PROGRAMS = kept_folder("xla")
"""Where compiled programs are kept unless --cache names a folder."""
_ASKED = "/jax/compilation_cache/compile_requests_use_cache"
_FOUND = "/jax/compilation_cache/cache_hits"
_events: Counter[str] = Counter()


def _count(event: str, **_: object) -> None:
    _events[event] += 1


jax.monitoring.register_event_listener(_count)


def keep_programs(folder: Path) -> None:
    """Keep every program compiled from now on in this folder, and look there first. Raises
    UserError where it can't be written."""
    if not _writable(folder):
        raise UserError(f"--cache: cannot write to {folder}: name a folder for compiled programs")
    if jax.config.values["jax_compilation_cache_dir"] == str(folder):
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # the small ones too: a start has hundreds of milliseconds of them
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # JAX decides once, at the first program, if it has a cache


def keep_programs_if_possible() -> None:
    """The same in the default folder. If that is not writable, only warn: the next start compiles
    again."""
    if _writable(PROGRAMS):
        keep_programs(PROGRAMS)
    else:
        log.warning(
            "cannot write to %s: compiled programs are not kept; --cache names another folder",
            PROGRAMS,
        )


def _writable(folder: Path) -> bool:
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder.is_dir() and os.access(folder, os.W_OK)


def programs_so_far() -> tuple[int, int]:
    """Programs of this process that were found, and that had to be compiled."""
    return _events[_FOUND], _events[_ASKED] - _events[_FOUND]
