"""Where files are kept for later starts: compiled programs, kernels, digests."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path


def kept_folder(name: str) -> Path:
    """The folder ~/.cache/specdec/NAME. A user without a home has it for this process alone."""
    return _home() / ".cache" / "specdec" / name


@cache
def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # neither HOME nor an entry in the list of users
        own = Path(tempfile.mkdtemp(prefix="specdec-"))
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        return own
