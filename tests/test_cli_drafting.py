"""Drafters with weights of their own, as a user asks for them: found, or refused in one line."""

from __future__ import annotations

import json
import shutil

import pytest

from targets import mini
from tests.commands import CUDA, PROMPT, refused, run

SHORT = ["generate", PROMPT, "--max-tokens", "10", "--slots", "1", "--max-len", "128", "--json"]


def document(capsys, *arguments):
    return json.loads(run(capsys, *SHORT, *arguments)[0].splitlines()[-1])


def test_mini_brings_its_draft_model(capsys):
    drafted = document(capsys, "--drafter", "model")
    assert drafted["config"]["speculation"]["draft_model"] == "mini-e"
    assert drafted["tokens"] == 10 and drafted["drafted"] > drafted["accepted"] > 0


def test_vllms_words_and_the_cuda_target(capsys):
    plain = document(capsys, "--drafter", "none", *CUDA)
    alias = '{"method": "draft_model", "num_speculative_tokens": 3}'
    drafted = document(capsys, "--speculative-config", alias, *CUDA)
    chosen = drafted["config"]["speculation"]
    assert (chosen["drafter"], chosen["draft_model"], chosen["k"]) == ("model", "mini-e", 3)
    assert drafted["text"] == plain["text"] and drafted["drafted"] > drafted["accepted"] > 0


def test_another_vocabulary_is_refused_with_both_hashes(capsys, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(mini.path("mini-e"), other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    first, second = (token for token in ids if ids[token] in (1000, 1001))
    ids[first], ids[second] = ids[second], ids[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    line = refused(capsys, *SHORT, "--drafter", "model", "--draft-model", str(other))
    hashes = line.partition("sha256 ")[2].partition(")")[0].split(", the model's ")
    assert len(hashes) == 2 and len(set(hashes)) == 2 and {len(h) for h in hashes} == {16}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--drafter", "model", "--model", "mini-e"], "needs --draft-model PATH"),
        (["--drafter", "model", "--draft-model", "/nowhere"], "no checkpoint folder"),
        (["--drafter", "ngram", "--draft-model", "mini-e"], "--draft-model is for"),
        (["--drafter", "model", *CUDA, "--loop", "device"], "--loop host"),
        (["--speculative-config", '{"draft_sample_method": "beam"}'], "probabilistic or greedy"),
    ],
)
def test_what_makes_no_sense_is_one_line(capsys, arguments, said):
    assert said in refused(capsys, *SHORT, *arguments)


def test_help_teaches_the_drafters(capsys):
    out, _ = run(capsys, "generate", "--help")
    for word in ("mini-e", "eagle3", "--draft-model", "speculators"):
        assert word in out
