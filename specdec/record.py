"""What is stored beside each output, so that a figure can be traced to what made it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from specdec import __version__

PACKAGES = ("jax", "jaxlib", "numpy", "safetensors", "tokenizers", "libtpu", "torch")


def run_record(device: str, packages: Iterable[str] = PACKAGES, **facts: Any) -> dict[str, Any]:
    """argv, commit, versions and device, and `facts` with them."""
    return {
        "argv": sys.argv,
        "specdec": __version__,
        "git": _git_sha(),
        "versions": versions(packages),
        "device": device,
        **facts,
    }


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Python's version, and those of the packages that are installed."""
    found = {"python": sys.version.split()[0]}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _git_sha() -> str | None:
    """The commit of this checkout; None for an installed package, or where there is no git."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--verify", "--quiet", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return done.stdout.strip() or None
