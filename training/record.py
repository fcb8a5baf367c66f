"""run.json beside each output: what was run, with what, where."""

import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax


def git_revision() -> str:
    """The commit of the working directory, "" where there is none or no git."""
    if shutil.which("git") is None:
        return ""
    command = ["git", "rev-parse", "--verify", "-q", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def write_run(path: Path, facts: dict[str, Any]) -> None:
    """Write argv, commit, versions and device to `path`, and `facts` with them."""
    libraries = ("jax", "optax", "orbax-checkpoint")
    found: dict[str, Any] = {"argv": sys.argv, "git": git_revision()}
    found["versions"] = {name: version(name) for name in libraries}
    found["device"] = jax.devices()[0].device_kind
    path.write_text(json.dumps(found | facts, indent=1))
