"""What people type and keep in files that makes no sense: one line each, before the work."""

from __future__ import annotations

import json
import shutil

import pytest

from specdec.core.errors import UserError
from specdec.evaluation.prompts import read_prompts
from targets import mini
from targets.tokenizer import load_tokenizer
from tests.support.commands import PROMPT, refused

GENERATE = ["generate", PROMPT, "--model", "/nowhere"]
"""Refused for its model if for nothing before."""


@pytest.mark.parametrize("key", ["num_speculative_tokens", "prompt_lookup_min"])
def test_true_is_no_number_of_tokens(capsys, key):
    line = refused(capsys, *GENERATE, "--speculative-config", json.dumps({key: True}))
    assert "True" in line and key in line


@pytest.mark.parametrize("number", ["1.5", "1e1", "true", "two", "0x4"])
def test_a_count_is_a_whole_number(capsys, number):
    line = refused(capsys, *GENERATE, "--k", number)
    assert "--k" in line and "whole number" in line and number in line
    assert "--max-tokens" in refused(capsys, *GENERATE, "--max-tokens", number)
    assert "--limit" in refused(capsys, "eval-acceptance", "/nowhere", "--limit", number)


@pytest.mark.parametrize("size", ["-1", "nan", "inf", "9e9"])
def test_memory_for_prompts_is_a_number_of_gib(capsys, size):
    for command in (("serve", "--port", "0"), ("compile",), ("doctor",)):
        assert "--cache-ram must be 0 or more GiB" in refused(capsys, *command, "--cache-ram", size)


@pytest.mark.parametrize("text", ["k = 1.5", "k = true", 'k = "1.5"'])
def test_a_count_in_a_file_is_a_whole_number(capsys, tmp_path, text):
    config = tmp_path / "run.toml"
    config.write_text(text)
    line = refused(capsys, *GENERATE, "--config", str(config))
    assert "run.toml" in line and "k" in line and "whole number" in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("k = ", ["not valid TOML"]),
        ("draftr = 'ngram'", ["draftr"]),
        ("temperature = 'hot'", ["temperature", "hot"]),
        ("[generate]\nk = 3", ["generate", "top"]),
        (b"k = 3 # \xff", ["UTF-8"]),
    ],
)
def test_a_bad_config_file_is_named(capsys, tmp_path, text, words):
    config = tmp_path / "run.toml"
    config.write_bytes(text if isinstance(text, bytes) else text.encode())
    line = refused(capsys, *GENERATE, "--config", str(config))
    assert all(word in line for word in ["run.toml", *words]), line


def test_a_file_as_cache_is_refused(capsys, tmp_path):
    file = tmp_path / "file"
    file.touch()
    line = refused(capsys, "generate", PROMPT, "--cache", str(file))
    assert "--cache" in line and str(file) in line


@pytest.mark.parametrize("content", [{"a": 1}, 3, None, [1], [{"type": "image"}], True])
def test_a_message_is_text(tmp_path, content):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": content}]}))
    with pytest.raises(UserError, match=r"prompts.jsonl:1.*messages.*text"):
        read_prompts(file)


def test_a_message_may_be_parts_of_text(tmp_path):
    file = tmp_path / "prompts.jsonl"
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    file.write_text(json.dumps({"messages": [{"role": "user", "content": parts}]}))
    (prompt,) = read_prompts(file)
    assert prompt.messages[0]["content"] == "one\ntwo"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("suppress_tokens", [10**6]),
        ("suppress_tokens", [-1]),
        ("suppress_tokens", ["a"]),
        ("suppress_tokens", [True]),
        ("eos_token_id", 10**6),
        ("eos_token_id", [1.5]),
        ("temperature", "0.7"),
        ("temperature", -1),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", [0.9]),
        ("top_k", 2.5),
        ("top_k", -1),
        ("min_p", 2),
        ("do_sample", "yes"),
    ],
)
def test_what_a_checkpoint_says_of_generation_is_checked(tmp_path, key, value):
    folder = tmp_path / "model"
    shutil.copytree(mini.path("mini"), folder)
    (folder / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(UserError, match=rf"generation_config.json: {key}"):
        load_tokenizer(folder)
