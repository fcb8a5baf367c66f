"""`specdec bench` on JAX as a user types it; test_cli_cuda.py has it on the other target."""

from __future__ import annotations

import json
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.bench import peer
from specdec.bench.sweep import Grid
from specdec.core.config import ModelConfig
from tests.support.commands import refused, run

pytestmark = pytest.mark.usefixtures("cheap_programs")


@pytest.mark.usefixtures("few_samples")
def test_bench_times_steps_and_compares_texts(capsys, tmp_path, worded):
    receipt = tmp_path / "receipt.json"
    arguments = ["bench", "--model", str(worded), "--slots", "2", "--contexts", "40"]
    arguments += ["--max-tokens", "12", "--repeats", "1", "--prompt-lengths", "16"]
    arguments += ["--max-len", "256"]
    out, _ = run(capsys, *arguments, "--out", str(receipt), "--json")
    document = json.loads(out.splitlines()[-1])
    assert document == json.loads(receipt.read_text())
    assert document["equal"] and len(document["runs"]) == 4
    assert {(s["batch"], s["width"]) for s in document["steps"]} == {(1, 1), (1, 8), (2, 1), (2, 8)}


def stubbed(monkeypatch, held: list[weakref.ref]) -> None:
    """A bench that measures nothing, of a model that nobody else keeps."""

    def load(*_, **__) -> Any:
        made = Held()
        held.append(weakref.ref(made))
        return made

    monkeypatch.setattr("specdec.cli.bench.loaded_model", load)
    monkeypatch.setattr("specdec.cli.bench._measure", lambda *_: {"equal": True})
    monkeypatch.setattr("specdec.cli.bench.print_bench", lambda *_: None)


class Held:
    def __init__(self) -> None:
        self.config, self.name = ModelConfig(), "m"
        self.target = SimpleNamespace(max_len=4096, max_draft=7)
        self.itself = self  # a ring, as callbacks make them


@pytest.mark.parametrize("name", ["transformers", "torch"])
def test_a_peer_that_is_not_installed_is_found_out_first(capsys, monkeypatch, name):
    held: list[weakref.ref] = []
    stubbed(monkeypatch, held)
    monkeypatch.setitem(sys.modules, name, None)
    line = refused(capsys, "bench", "--peer", "transformers", "--json")
    assert "--peer transformers: pip install" in line and name in line and not held


def test_the_peer_has_the_memory_that_the_model_had(capsys, monkeypatch):
    held: list[weakref.ref] = []
    stubbed(monkeypatch, held)

    def measure(*_) -> dict[str, Any]:
        return {"alone": held[0]() is None, "runs": []}

    monkeypatch.setattr("specdec.bench.peer.measure", measure)
    out, _ = run(capsys, "bench", "--peer", "transformers", "--json")
    assert json.loads(out)["peer"] == {"alone": True, "runs": []}


@pytest.mark.parametrize("failure", [MemoryError("no room"), ValueError("of an unknown kind")])
def test_a_peer_that_cannot_be_made_is_reported(monkeypatch, failure):
    def fail(*_, **__) -> None:
        raise failure

    auto = SimpleNamespace(for_model=lambda **_: None), SimpleNamespace(from_config=fail)
    stub = SimpleNamespace(AutoConfig=auto[0], AutoModelForCausalLM=auto[1], __version__="1")
    monkeypatch.setitem(sys.modules, "transformers", stub)
    grid = Grid((1, 2), (8,), (1,), (3,), (8,), (), 4)
    text = {"model_type": "gemma4_text", "vocab_size": 10}
    found = peer.measure(text, grid, 3, ModelConfig(device="cpu"))
    assert [(row["name"], row["batch"]) for row in found["runs"]] == [
        ("dynamic cache", 1), ("dynamic cache", 2), ("prompt lookup", 1),
        ("static cache, compiled", 1), ("static cache, compiled", 2),
    ]  # fmt: skip
    words = f"{type(failure).__name__}: {failure}"
    assert all(row["failure"] == words for row in found["runs"])
