"""The command line on a tiny model: whatever drafts, the texts are equal, and reports prove it."""

from __future__ import annotations

import json

import pytest

from tests.support.commands import PROMPT, run

pytestmark = pytest.mark.usefixtures("cheap_programs")


def test_drafter_k_and_loop_do_not_change_the_text(capsys, worded):
    base = ["generate", PROMPT, "--max-tokens", "16", "--json", "--seed", "3"]
    base += ["--model", str(worded), "--max-len", "256"]
    variants = [["--drafter", "none"], ["--k", "7"], ["--loop", "device"]]
    variants.append(["--loop", "device", "--drafter", "suffix"])
    texts = {json.loads(run(capsys, *base, *v)[0].splitlines()[-1])["text"] for v in variants}
    assert len(texts) == 1


def test_eval_acceptance_reports_and_proves_equality(capsys, tmp_path, worded):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def f(x):"}\n{"prompt": "import os\\nimport sys\\n"}\n')
    arguments = ["eval-acceptance", str(prompts), "--max-tokens", "24", "--out", str(tmp_path)]
    arguments += ["--model", str(worded), "--max-len", "256", "--temperature", "0.8"]
    out, err = run(capsys, *arguments, "--json")
    document = json.loads(out.splitlines()[-1])
    assert document["equality"]["equal"] and document["overall"]["tau"] >= 1
    assert json.loads((tmp_path / "report.json").read_text())["overall"] == document["overall"]
    assert (tmp_path / "report.png").stat().st_size > 10_000
    assert "plain, width 1" in document["speeds"]
