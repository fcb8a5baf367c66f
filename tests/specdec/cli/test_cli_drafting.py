"""Command line options for drafters with weights: the weights are found, or refused in one line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from drafters.assistant import embedded as assistants
from drafters.eagle3 import embedded as heads
from drafters.eagle3.spec import random_head, sized, tensors
from drafters.registry import resolved
from specdec.core.config import ModelConfig, SpeculationConfig
from targets import mini
from targets.arch import released
from tests.support.commands import CUDA, PROMPT, refused, run

pytestmark = pytest.mark.usefixtures("cheap_programs")

SHORT = ["generate", PROMPT, "--max-tokens", "10", "--json"]


def document(capsys, *arguments):
    return json.loads(run(capsys, *SHORT, *arguments)[0].splitlines()[-1])


OWN = {"model": "mini-e", "eagle3": "mini-eagle3", "assistant": "mini-assistant"}


@pytest.mark.parametrize(
    ("drafter", "name"),
    [
        pytest.param(*own, marks=[pytest.mark.slow] if own[0] == "assistant" else [])
        for own in OWN.items()
    ],
)
def test_mini_brings_what_drafts_for_it(capsys, drafter, name):
    drafted = document(capsys, "--drafter", drafter)
    assert drafted["config"]["speculation"]["draft_model"] == name
    assert drafted["tokens"] == 10 and drafted["drafted"] > drafted["accepted"] > 0


HEADS = {"eagle3": (heads, 8), "assistant": (assistants, 10)}


@pytest.mark.parametrize("drafter", HEADS)
def test_the_embedded_heads_are_small_and_for_mini_alone(capsys, drafter):
    embedded, mebibytes = HEADS[drafter]
    files = embedded.path(OWN[drafter]).iterdir()
    assert sum(file.stat().st_size for file in files if file.suffix != ".png") <= mebibytes << 20
    of_another = ["--drafter", drafter, "--model", "mini-e", "--draft-model", OWN[drafter]]
    line = refused(capsys, *SHORT, *of_another)
    assert "is for a target of width 256, not 96" in line


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
    ("arguments", "message"),
    [
        (["--drafter", "model", "--model", "mini-e"], "needs --draft-model PATH"),
        (["--drafter", "model", "--draft-model", "/nowhere"], "no checkpoint folder"),
        (["--drafter", "ngram", "--draft-model", "mini-e"], "--draft-model is for"),
        (["--drafter", "model", *CUDA, "--loop", "device"], "--loop host"),
        (["--speculative-config", '{"draft_sample_method": "beam"}'], "probabilistic or greedy"),
    ],
)
def test_what_makes_no_sense_is_one_line(capsys, arguments, message):
    assert message in refused(capsys, *SHORT, *arguments)


def test_a_random_head_is_of_the_models_size(capsys):
    given = SpeculationConfig(drafter="eagle3")
    assert resolved(given, ModelConfig(), random=True).draft_model is None
    spec = sized(released("gemma-4-31b"))
    assert (spec.heads, spec.kv_heads, spec.ffw, spec.draft_vocab) == (42, 6, 21504, 32000)
    small = random_head(replace(spec, hidden=64, ffw=32, vocab=500, draft_vocab=100))
    assert {n: w.shape for n, w in small.weights.items()} == tensors(small.spec)
    assert len(set(small.target_ids.tolist())) == 100 and small.target_ids.max() < 500
    arguments = ["bench", "--random", "gemma-4-e4b", "--drafter", "eagle3", "--draft-model", "head"]
    assert "leave --draft-model out" in refused(capsys, *arguments)


def test_help_teaches_the_drafters(capsys):
    out, _ = run(capsys, "generate", "--help-all")
    for word in ("mini-e", "eagle3", "--draft-model", "speculators"):
        assert word in out
