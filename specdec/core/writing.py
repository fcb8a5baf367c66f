"""Writes result files: a full disk gives a one-line error, and leaves earlier files intact."""

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
    """Raise UserError if `file` can't be written. stands: results that exist nevertheless, for the
    message."""
    try:
        yield
    except OSError as problem:
        why = problem.strerror or problem
        raise UserError(
            f"cannot write {file}: {why}{stands and '; '}{stands}: make room and repeat the command"
        ) from None


def write_whole(file: Path, text: str) -> None:
    """Write a temporary file and rename it, so that the file is never partial. Raises UserError."""
    beside = file.with_name(f"partial{file.suffix}")
    with writing(file):
        if file.exists() and not file.is_file():  # /dev/stdout: not to be replaced
            file.write_text(text)
            return
        try:
            beside.write_text(text)
            beside.rename(file)
        except OSError:
            beside.unlink(missing_ok=True)  # free its space
            raise


def said_of(problem: OSError) -> str | None:
    """A one-line message if the disk is full or read-only; None for other failures."""
    if problem.errno not in NO_ROOM:
        return None
    where = os.fsdecode(problem.filename) if problem.filename else "the output"
    return f"cannot write {where}: {problem.strerror}: make room and repeat the command"
