"""What is installed is ours and whole: strangers' packages of our names are one line of error, and
the recipes come along."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.core.errors import UserError
from tests.support.places import ROOT
from training.recipe import RECIPES, find_recipe, read_recipe


def run_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Another Python in this folder, which it searches first."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["training", "drafters"])
@pytest.mark.parametrize(
    "arguments", [["-m", "specdec", "doctor"], ["-c", "import specdec; specdec.load('mini')"]]
)
def test_a_strangers_package_is_one_line(tmp_path, name, arguments):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    done = run_in(tmp_path, *arguments)
    said = done.stderr.strip().splitlines()[-1]
    assert f"finds the package {name} in {tmp_path / name}" in said and done.returncode != 0
    assert arguments[0] == "-c" or "Traceback" not in done.stderr


def test_recipes_come_along_without_a_clone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("configs/eagle3-mini-cpu.toml", "eagle3-mini-cpu.toml", "eagle3-mini-cpu"):
        assert find_recipe(Path(name)) == RECIPES / "eagle3-mini-cpu.toml"
        assert read_recipe(Path(name)).steps > 0
    with pytest.raises(UserError, match="elsewhere/eagle3-mini-cpu.toml is missing"):
        read_recipe(Path("elsewhere/eagle3-mini-cpu.toml"))


def test_everything_that_is_tracked_is_in_the_wheel():
    """By what pyproject.toml declares: every data file of the packages matches a pattern."""
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    tops = ("specdec", "drafters", "targets", "training", "serve")
    data = [f for top in tops for f in (ROOT / top).rglob("*") if f.is_file()]
    patterns = settings["package-data"]
    kept = set()
    for package, globs in patterns.items():
        for top in tops if package == "*" else [package.replace(".", "/")]:
            kept |= {f for pattern in globs for f in (ROOT / top).glob(pattern)}
    left = [
        f.relative_to(ROOT)
        for f in data
        if f.suffix not in (".py", ".pyc") and f not in kept and "__pycache__" not in f.parts
    ]
    assert not left
