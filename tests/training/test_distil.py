"""Distilled answers are the target's own, whole and once, whatever was killed in between."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from specdec.cli import main
from specdec.core.errors import UserError
from tests.support.commands import refused, run
from tests.support.distil_worker import PROMPTS, run as distil_fake, source
from tests.support.places import ROOT
from training.distil import claim, cut_documents, read_answers, shards, split_answers


def killed(out: Path, where: str, count: int) -> int:
    command = [sys.executable, "-m", "tests.support.distil_worker", str(out), where, str(count)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode


def test_killed_runs_add_up_to_the_uninterrupted_one(tmp_path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    distil_fake(whole)
    chance = random.Random(3)
    for where in ("told", "written", "told", "written", "told"):
        count = chance.randint(1, 4 if where == "written" else 7)
        assert killed(broken, where, count) in (-signal.SIGKILL, 0)
    distil_fake(broken)
    assert [f.name for f in shards(broken)] == [f.name for f in shards(whole)]
    for ours, theirs in zip(shards(broken), shards(whole), strict=True):
        assert ours.read_bytes() == theirs.read_bytes()


def test_rows_are_prompts_and_answers_in_order_whoever_drafts(tmp_path) -> None:
    distil_fake(tmp_path / "drafted")
    distil_fake(tmp_path / "plain", drafting=False)
    rows, manifest = read_answers(tmp_path / "drafted")
    assert rows["row"][:] == list(range(len(PROMPTS))) and manifest["max_tokens"] == 9
    assert rows[:] == read_answers(tmp_path / "plain")[0][:]
    for prompt, row in zip(PROMPTS, rows, strict=True):
        ids, mask = row["input_ids"], row["gen_mask"]
        assert ids[: len(prompt)] == prompt
        assert mask == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
        assert row["finish"] == ("stop" if ids[-1] == 11 else "length")
        assert row["seed"] == 7 + row["row"]


def test_another_runs_folder_is_refused(tmp_path) -> None:
    claim(tmp_path, source())
    with pytest.raises(UserError, match="target, max_tokens"):
        claim(tmp_path, source(target="y", max_tokens=8))
    with pytest.raises(UserError, match="other dtype, int8"):
        claim(tmp_path, source(dtype="bfloat16", int8=True))
    with pytest.raises(UserError, match="no whole shard"):
        read_answers(tmp_path)
    with pytest.raises(UserError, match="specdec distil"):
        read_answers(tmp_path / "nowhere")


def test_of_each_folder_the_last_answers_are_held_out(tmp_path) -> None:
    folders = tmp_path / "drafted", tmp_path / "plain"
    for folder in folders:
        distil_fake(folder)
    read = [(folder, *read_answers(folder)) for folder in folders]
    target, whole = source().target, read[0][1]
    first = len(whole) - round(len(whole) * 0.2)
    split = split_answers(read, target, 0.2)
    assert split.trained["row"][:] == 2 * list(range(first))
    assert split.heldout["row"][:] == 2 * list(range(first, len(whole)))
    assert [part["answers"] for part in split.source["folders"]] == [len(whole)] * 2
    with pytest.raises(UserError, match="drafted was written by another model"):
        split_answers(read, "another", 0.2)


@given(st.lists(st.lists(st.integers(3, 99), max_size=40), min_size=1), st.integers(2, 12))
def test_cut_documents_are_prompts_of_the_length(documents, tokens) -> None:
    pieces = cut_documents([[2, *document] for document in documents], tokens)
    assert all(piece[0] == 2 and len(piece) <= tokens for piece in pieces)
    assert len(pieces) >= len(documents)
    ids = [i for document in documents for i in document]
    assert sum(len(piece) - 1 for piece in pieces) <= len(ids)


@pytest.mark.usefixtures("cheap_programs")
def test_the_command_distils_and_continues(tmp_path, capsys, worded) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "data"
    prompts.write_text('{"text": "def add(a, b):\\n    return a + b\\n"}\n' * 3)
    command = ["distil", str(prompts), "--out", str(out), "--cut", "8", "--limit", "2"]
    command += ["--max-tokens", "4", "--temperature", "1", "--model", str(worded)]
    run(capsys, *command)
    rows, manifest = read_answers(out)
    assert len(rows) == 2 and len(manifest["target"]) == 64
    assert "--shard-rows" in refused(capsys, *command, "--shard-rows", "0")
    other = ["distil", str(prompts), "--out", str(tmp_path / "other"), "--max-tokens", "0"]
    assert "--max-tokens" in refused(capsys, *other) and not (tmp_path / "other").exists()
    assert "continues at row 2 of 2" in run(capsys, *command)[1]
    with pytest.raises(SystemExit):
        main([*command, "--int8"])
    assert "other int8" in capsys.readouterr().err.splitlines()[-1]
