"""The wheel, built and installed as docs/guide/install.md types it, in fresh environments.

Run with: pytest -m install (needs pipx and uv on the PATH, and a package index; some minutes).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from specdec.core.version import VERSION
from tests.support.places import ROOT

pytestmark = pytest.mark.install
PACKAGED = ("specdec", "targets", "drafters", "serve", "training")
"""What a wheel is built of, beside pyproject.toml, README.md and LICENSE."""


def blocks() -> list[str]:
    """The guide's commands: how a wheel is built, pipx's and uvx's."""
    guide = (ROOT / "docs/guide/install.md").read_text()
    section = guide.partition("## From a wheel\n")[2].partition("\n## ")[0]
    return re.findall(r"^```\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)


def typed(block: str, folder: Path) -> str:
    """What the commands print, in this folder and with homes of pipx's and uv's own."""
    homes = {
        "PIPX_HOME": folder / "pipx",
        "PIPX_BIN_DIR": folder / "bin",
        "UV_CACHE_DIR": folder / "uv",
    }
    own = {name: str(path) for name, path in homes.items()}
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=folder,
        env=inherited | own | {"PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A clone in which the wheel was built."""
    folder = tmp_path_factory.mktemp("clone")
    for name in PACKAGED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    typed(blocks()[0], folder)
    (wheel,) = (folder / "dist").iterdir()
    assert wheel.name == f"specdec_gemma-{VERSION}-py3-none-any.whl"
    return folder


@pytest.mark.parametrize(("tool", "number"), [("pipx", 1), ("uvx", 2)])
def test_the_wheel_runs_as_the_guide_types_it(clone, tmp_path, tool, number):
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    (tmp_path / "dist").symlink_to(clone / "dist")
    block = blocks()[number]
    assert block.startswith(tool)
    said = typed(block, tmp_path)
    assert "model mini (embedded" in said and "16 tokens (length)" in said, said
