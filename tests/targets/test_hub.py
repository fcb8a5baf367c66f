"""Models by their names on the Hugging Face hub, from a hub on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from huggingface_hub import constants

import specdec
from drafters.eagle3.files import save_flat
from drafters.eagle3.spec import random_head
from specdec.core.errors import UserError
from targets import hub, mini
from tests.support import cheap
from tests.support.commands import free_port, run, wait_until_ready
from tests.support.eagle3_oracle import SPEC
from tests.support.hub_server import SHA, Hub, hub_of
from tests.support.worded import WORDS

pytestmark = pytest.mark.usefixtures("cheap_programs")

REPO = "org/tiny"
WEIGHTS = bytes(range(256)) * 2**17
"""More than one of the pieces in which the library writes."""


@pytest.fixture
def served(worded, tmp_path, monkeypatch):
    files = {file.name: file.read_bytes() for file in worded.iterdir()}
    files |= {"modeling.py": b"boom", "pytorch_model.bin": b"boom", "onnx/model.safetensors": b"x"}
    big = {
        "config.json": b"{}",
        "model.safetensors": WEIGHTS,
        "model.safetensors.index.json": b"{}",
    }
    with hub_of({REPO: files, "org/big": big, "org/pickled": {"pytorch_model.bin": b"x"}}) as made:
        made.repos["org/empty"] = {"README.md": b""}
        for name, value in {"ENDPOINT": made.url, "HF_HUB_CACHE": str(tmp_path / "hub")}.items():
            monkeypatch.setattr(constants, name, value)
        template = made.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        hub.fetched.cache_clear()
        yield made
    hub.fetched.cache_clear()


def test_only_what_is_read_is_fetched_and_once(served: Hub, worded, capsys):
    folder = mini.checkpoint_path(REPO)
    got = {file.name for file in folder.iterdir()}
    assert got == {file.name for file in worded.iterdir()}
    assert all((folder / name).read_bytes() == (worded / name).read_bytes() for name in got)
    assert f"downloading {REPO}" in capsys.readouterr().err
    hub.fetched.cache_clear()
    served.asked.clear()
    assert mini.checkpoint_path(REPO) == folder
    assert not [path for method, path, _ in served.asked if method == "GET" and "resolve" in path]


def test_a_cut_download_goes_on(served: Hub, monkeypatch):
    served.cut.add("model.safetensors")
    folder = hub.fetched("org/big")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [r for m, path, r in served.asked if m == "GET" and path.endswith("l.safetensors")]
    assert ranges[-1] is not None and ranges[-1].startswith("bytes=")
    assert ranges[-1] != "bytes=0-"


def test_a_revision_and_a_token(served: Hub, monkeypatch):
    served.gated.add(REPO)
    with pytest.raises(UserError, match="accept its terms.*HF_TOKEN"):
        hub.fetched(f"{REPO}@v1")
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert hub.fetched(f"{REPO}@v1").name == SHA
    with pytest.raises(UserError, match="no revision v2"):
        hub.fetched(f"{REPO}@v2")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/nobody", "no folder of that name.*no such model"),
        ("org/pickled", "pickles only"),
        ("org/empty", "no safetensors"),
    ],
)
def test_what_is_refused(served: Hub, name, words):
    with pytest.raises(UserError, match=words):
        hub.fetched(name)
    assert not [path for _, path, _ in served.asked if "resolve" in path]


def test_room_is_checked_before(served: Hub):
    served.sizes["model.safetensors"] = 10**18
    with pytest.raises(UserError, match="needs 1000000000.0 GB more.*HF_HOME"):
        hub.fetched("org/big")
    assert not [path for _, path, _ in served.asked if "resolve" in path]


def test_offline_finds_what_is_there(served: Hub, monkeypatch):
    folder = hub.fetched(REPO)
    hub.fetched.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.fetched(REPO) == folder
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        hub.fetched("org/big")


def test_no_network_finds_what_is_there(served: Hub, monkeypatch):
    folder = hub.fetched(REPO)
    hub.fetched.cache_clear()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert hub.fetched(REPO) == folder
    with pytest.raises(UserError, match="cannot be reached"):
        hub.fetched("org/big")


def test_folders_come_first_and_paths_are_never_asked(tmp_path, monkeypatch):
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert mini.checkpoint_path("org/tiny") == Path("org/tiny")
    for path in ("./x", "/x", "../x/y", "~/x", "x", "a/b/c", "./a/b", "org/", "-/x", "mini"):
        assert not hub.is_name(path), path
    assert hub.is_name("google/gemma-4-E4B-it") and hub.is_name("a/b@refs/pr/1")


def test_commands_take_names(served: Hub, capsys):
    options = ["--max-len", "64", "--slots", "1", "--k", "1", "--max-tokens", "3", "--json"]
    _, err = run(capsys, "generate", "def f(", "--model", REPO, *options)
    assert f"model {REPO}" in err and "downloading" in err


@pytest.mark.parametrize(("drafter", "repo"), [("model", "org/tiny"), ("eagle3", "org/head")])
def test_the_door_and_drafters_take_names(served: Hub, tmp_path, drafter, repo):
    head = random_head(replace(SPEC, hidden=48, vocab=WORDS, layers=(0, 1, 2)))
    save_flat(head, tmp_path / "head", (1,))
    files = {file.name: file.read_bytes() for file in (tmp_path / "head").iterdir()}
    served.repos["org/head"] = files
    options = {"drafter": drafter, "draft_model": repo, "k": 2, "slots": 1, "max_len": 64}
    with specdec.load(REPO, **options) as llm:
        answer = llm.generate("def f(", max_tokens=6, temperature=0.0)
    with specdec.load(REPO, drafter="none", slots=1, max_len=64) as llm:
        assert llm.generate("def f(", max_tokens=6, temperature=0.0).text == answer.text
    assert answer.acceptance.drafted > 0


def test_a_server_takes_a_name(served: Hub, tmp_path):
    port = free_port()
    command = [sys.executable, "-m", "specdec", "serve", "--model", REPO, "--port", port]
    options = ["--max-len", "64", "--slots", "1", "--k", "1"]
    cache = ["--cache", os.environ["JAX_COMPILATION_CACHE_DIR"]]
    env = os.environ | {"HF_ENDPOINT": served.url, "HF_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    env |= {"XLA_FLAGS": cheap.FLAGS}
    server = subprocess.Popen([*command, *options, *cache], env=env, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(server, url)
        (model,) = httpx.get(f"{url}/v1/models").json()["data"]
        body = {"model": model["id"], "prompt": "def f(", "max_tokens": 3}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200 and model["id"] == REPO
    finally:
        server.kill()
        server.wait()
