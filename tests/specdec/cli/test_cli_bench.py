"""`specdec bench` on JAX as a user types it; test_cli_cuda.py has it on the other target."""

from __future__ import annotations

import json

import pytest

from tests.support.commands import run

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
