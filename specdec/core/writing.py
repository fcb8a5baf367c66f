"""Writing what a run is for: a full disk is one line, and costs nothing that was written before."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specdec.core.errors import UserError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@contextmanager
def writing(file: Path, stands: str = "") -> Iterator[None]:
    """Raise UserError where `file` can't be written. stands: what the folder holds nevertheless."""
    try:
        yield
    except OSError as problem:
        why = problem.strerror or problem
        raise UserError(
            f"cannot write {file}: {why}{stands and '; '}{stands}: make room and repeat the command"
        ) from None


def write_whole(file: Path, text: str) -> None:
    """Beside and renamed, so that a file is whole or not there. Raises UserError."""
    beside = file.with_name(f"partial{file.suffix}")
    with writing(file):
        if file.exists() and not file.is_file():  # /dev/stdout: not to be replaced
            file.write_text(text)
            return
        try:
            beside.write_text(text)
            beside.rename(file)
        except OSError:
            beside.unlink(missing_ok=True)  # what it holds is room
            raise


def said_of(problem: OSError) -> str | None:
    """One line about a disk that is full or may not be written; None for other failures."""
    if problem.errno not in NO_ROOM:
        return None
    where = os.fsdecode(problem.filename) if problem.filename else "the output"
    return f"cannot write {where}: {problem.strerror}: make room and repeat the command"
