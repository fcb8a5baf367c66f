"""Keeps a second process out of a folder of results, which both would spoil."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from specdec.core.errors import UserError
from specdec.core.writing import UNFINISHED

LOCK = ".specdec-lock"
FORGOTTEN = 3600.0
"""Seconds after which a file that is half written is one that a kill cut off."""
_held: dict[str, int] = {}
"""Real paths of folders -> open files of their locks."""


def hold_alone(folder: Path, option: str) -> None:
    """Lock a folder that exists until this process ends; the kernel frees it then, whatever ended
    it. Raises UserError, which names the option, where another process holds it."""
    place = os.path.realpath(folder)
    if place in _held:
        return
    try:
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as problem:
        raise UserError(
            f"{option}: cannot write {folder / LOCK} ({problem.strerror}): name another folder"
        ) from None
    with suppress(OSError):  # not its owner: whoever may write in the folder may hold it
        os.fchmod(file, folder.stat().st_mode & 0o666)
    _lock(file, folder, option)
    _held[place] = file
    forget_unfinished(folder)


def _lock(file: int, folder: Path, option: str) -> None:
    """A lock of the process, which processes that it forks don't inherit: they may outlive it."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(file)
        raise UserError(
            f"{option}: another process works in {folder}: wait until it ends, or name another "
            "folder"
        ) from None
    except OSError:
        pass  # a file system without locks: as if nobody else were there


def forget_unfinished(folder: Path) -> None:
    """Remove this user's files of which a kill cut the writing off."""
    for file in folder.glob(f"{UNFINISHED}*"):
        with suppress(FileNotFoundError):
            found = file.lstat()
            if found.st_uid == os.geteuid() and found.st_mtime < time.time() - FORGOTTEN:
                file.unlink()
