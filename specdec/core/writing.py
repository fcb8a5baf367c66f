"""Writes result files: a full disk gives a one-line error, and leaves earlier files intact."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specdec.core.errors import UserError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
UNFINISHED = ".specdec-partial-"
"""How the names of files begin that are being written, or whose writing was cut off."""


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


@contextmanager
def beside(file: Path) -> Iterator[Path]:
    """A new file, of a name that no other writer has, which the block fills. It then takes the
    place of `file`, or of what that links to, so that the file is never partial. If the block
    raises, it is removed."""
    place = Path(os.path.realpath(file))
    made = _new_file(place)
    try:
        mode = (place if place.exists() else made).stat().st_mode
        yield made
        made.chmod(mode)  # of whoever may write or read it: libraries have stricter ones
        _flush(made)
        made.replace(place)
    except BaseException:
        made.unlink(missing_ok=True)  # free its space
        raise


def _new_file(place: Path) -> Path:
    """An empty file in the same folder, of a name that nobody's *.json fits."""
    made = place.with_name(f"{UNFINISHED}{secrets.token_hex(6)}")
    made.touch(exist_ok=False)
    return made


def _flush(file: Path) -> None:
    """Its content must be on the disk before its name is: the power may fail."""
    number = os.open(file, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_whole(file: Path, text: str) -> None:
    """Write a text `beside`, in UTF-8. Raises UserError."""
    with writing(file):
        if is_in_place(file):
            file.write_text(text, encoding="utf-8")
            return
        with beside(file) as made:
            made.write_text(text, encoding="utf-8")


def is_in_place(file: Path) -> bool:
    """Whether a file that exists is not to be replaced by another: a pipe, a device, /dev/stdout
    wherever it leads."""
    if not file.exists():
        return False
    return not file.is_file() or any(map(_of_the_system, _links(file)))


def _links(file: Path) -> Iterator[Path]:
    """The path, and each that it leads to."""
    yield file
    while file.is_symlink():
        yield (file := file.parent / file.readlink())


def _of_the_system(path: Path) -> bool:
    folder = Path(os.path.realpath(path.parent))
    return folder == Path("/dev") or folder.is_relative_to("/proc")


def said_of(problem: OSError) -> str | None:
    """A one-line message if the disk is full or read-only; None for other failures."""
    if problem.errno not in NO_ROOM:
        return None
    where = os.fsdecode(problem.filename) if problem.filename else "the output"
    return f"cannot write {where}: {problem.strerror}: make room and repeat the command"
