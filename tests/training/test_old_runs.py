"""What 0.1.0 wrote goes on working: a run folder, the answers it was trained on, and recipes."""

from __future__ import annotations

import hashlib
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from specdec.core.errors import UserError
from targets.mini import path
from targets.tokenizer import load_tokenizer
from tests.support.commands import refused, run
from tests.support.places import DATA
from training.distil import Source, claim

ARCHIVE = DATA / "run-0.1.0.tar.xz"
"""Made by 0.1.0 (commit 087d8f1) with mini-e: distil of four prompts, train-eagle3 of two steps."""
EXPORTED = "566b4f9176d518a95cffec875ebbf2a30918098a31bf63c54ec8e66ddfe42c96"
"""sha256 of the weights that 0.1.0 exported from it."""


@pytest.fixture
def old(tmp_path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def training(old: Path) -> list[str]:
    given = ["train-eagle3", str(old / "recipe.toml"), "--model", "mini-e"]
    return [*given, "--data", str(old / "data"), "--run", str(old / "run")]


def test_a_run_of_0_1_0_goes_on_and_is_exported_as_it_was(old, capsys):
    out, err = run(capsys, *training(old), "--json")
    assert "continues at step 2 of 2" in err
    assert json.loads(out.splitlines()[-1])["steps"] == 2
    run(capsys, "export-eagle3", str(old / "run"), "--model", "mini-e", "--out", str(old / "head"))
    weights = (old / "head" / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == EXPORTED


def test_answers_of_0_1_0_are_continued_though_the_template_is_another(old):
    """mini's template has learnt tools since; the prompts' ids are what decides the rows."""
    recorded = json.loads((old / "data" / "distil.json").read_text())
    now = load_tokenizer(path("mini-e")).template_fingerprint
    assert recorded["template"] != now
    used = {"backend": "jax", "dtype": "float32", "kv_dtype": "float32", "int8": False, "tp": 1}
    same = {"template": now, "stop_ids": tuple(recorded["stop_ids"])}
    source = Source(**recorded | same | used)
    assert claim(old / "data", source) == 4
    with pytest.raises(UserError, match="other prompts"):
        claim(old / "data", replace(source, prompts="x"))


def test_another_recipe_is_refused_as_ever(old, capsys):
    recipe = old / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("unroll = 2", "unroll = 1"))
    assert "recipe" in refused(capsys, *training(old))
