"""The record stored beside each output: command, commit, versions and device."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from specdec.core.version import VERSION

PACKAGES = ("jax", "jaxlib", "numpy", "safetensors", "tokenizers", "libtpu", "torch")
PACKAGES += ("cuda-bindings", "transformers", "pillow")

GPU_FACTS = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm")
GPU_FACTS += ("power.draw", "power.limit", "temperature.gpu", "memory.used", "memory.total")


def run_record(device: str, packages: Iterable[str] = PACKAGES, **facts: Any) -> dict[str, Any]:
    """argv, commit, versions and device, and `facts` with them."""
    return {
        "argv": sys.argv,
        "specdec": VERSION,
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


def gpus() -> list[dict[str, str]]:
    """The current name, driver, clocks and limits of each NVIDIA GPU; empty without a GPU or
    without nvidia-smi."""
    try:
        asked = ["nvidia-smi", f"--query-gpu={','.join(GPU_FACTS)}", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = done.stdout.splitlines() if done.returncode == 0 else []
    return [dict(zip(GPU_FACTS, row.split(", "), strict=False)) for row in rows]


def _git_sha() -> str | None:
    """The commit in the file `.git-sha`, which a copy of a checkout may have (its own history may
    be older), else this checkout's commit; None for an installed package, or without git."""
    root = Path(__file__).parents[2]
    noted = root / ".git-sha"
    if noted.is_file():
        return noted.read_text().strip()
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
