"""The command line as a user types it: text, statistics, JSON, and one line for each mistake."""

from __future__ import annotations

import json
import socket

import pytest

from tests.support.commands import CUDA, PROMPT, refused, run


def test_generate_streams_text_and_ends_with_json(capsys):
    out, err = run(capsys, "generate", PROMPT, "--max-tokens", "12", "--json")
    *text, last = out.splitlines()
    document = json.loads(last)
    assert "\n".join(text) == PROMPT + document["text"]
    assert document["tokens"] <= 12 and document["tau"] >= 1
    assert document["config"]["speculation"]["drafter"] == "auto"
    assert "embedded" in err and "tau" in err and "tok/s" in err


def test_toml_then_flags_and_the_vllm_alias(capsys, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text('drafter = "none"\nk = 2\nmax_tokens = 4\nslots = 4\n')
    arguments = ["generate", PROMPT, "--config", str(config), "--k", "1", "--json"]
    document = json.loads(run(capsys, *arguments)[0].splitlines()[-1])
    assert document["tokens"] <= 4
    chosen = document["config"]["speculation"]
    assert (chosen["drafter"], chosen["k"]) == ("none", 1)
    alias = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'
    arguments += ["--speculative-config", alias]
    chosen = json.loads(run(capsys, *arguments)[0].splitlines()[-1])["config"]["speculation"]
    assert (chosen["drafter"], chosen["k"], chosen["ngram_max"]) == ("ngram", 3, 4)


def test_perplexity_scores_each_token_once(capsys, tmp_path):
    text = tmp_path / "text.py"
    text.write_text(PROMPT * 20)
    out, err = run(capsys, "perplexity", str(text), "--window", "64", "--stride", "32", "--json")
    document = json.loads(out.splitlines()[-1])
    assert document["low"] <= document["perplexity"] <= document["high"]
    assert "perplexity" in err


def test_doctor_finds_mini_sound_and_exact(capsys):
    out, err = run(capsys, "doctor", "--json", "--cache-ram", "1")
    assert "prefix cache: up to 1.0 GiB of host memory" in " ".join(err.split())
    document = json.loads(out.splitlines()[-1])
    assert document["healthy"] and document["verdict"] == "sound"
    assert all(check["differing"] == 0 for check in document["checks"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", ""], ["empty"]),
        (["generate", PROMPT, "--k", "32"], ["K must be 0 to 31", "32"]),
        (["generate", PROMPT, "--k", "-1"], ["K must be 0 to 31", "-1"]),
        (["generate", PROMPT, "--drafter", "oracle"], ["oracle", "none, ngram"]),
        (["generate", PROMPT, "--backend", "tpu9"], ["tpu9", "jax"]),
        (["generate", PROMPT, "--model", "/nowhere"], ["/nowhere", "Hugging Face"]),
        (["generate", PROMPT, "--temperature", "nan"], ["temperature", "finite"]),
        (["generate", PROMPT, "--top-p", "0"], ["top_p"]),
        (["generate", PROMPT, "--slots", "0"], ["slots"]),
        (["generate", PROMPT, "--max-len", "8"], ["--max-len"]),
        (["generate", PROMPT, "--ngram-min", "0"], ["n_min"]),
        (["generate", PROMPT, "--speculative-config", "{"], ["not JSON"]),
        (["generate", PROMPT, "--speculative-config", '{"metod": 1}'], ["metod"]),
        (["generate", "--prompt-file", "/nowhere"], ["/nowhere"]),
        (["generate", PROMPT, "--sped", "3"], ["--sped"]),
        (["generate", PROMPT, "--config", "/nowhere.toml"], ["/nowhere.toml"]),
        (["eval-acceptance", "/nowhere.jsonl"], ["/nowhere.jsonl"]),
        (["perplexity", "/nowhere.txt"], ["/nowhere.txt"]),
        (["serve", "--port", "99999"], ["port", "99999"]),
        (["serve", "--max-waiting", "-5"], ["max-waiting", "-5"]),
        (["generate", PROMPT, "--tp", "0"], ["--tp", "0"]),
        (["bench", "--drafter", "oracle"], ["oracle", "none, ngram"]),
        (["bench", "--contexts", "-5"], ["--contexts", "-5"]),
        (["bench", "--out", "/proc/x/y.json"], ["--out", "/proc/x"]),
        (["bench", "--random", "gemma-9"], ["gemma-9", "gemma-4-31b"]),
        (["bench", "--routing-overlap", "0.4"], ["--routing-overlap", "--random"]),
        (
            ["bench", "--random", "gemma-4-26b-a4b", "--routing-overlap", "0.4"],
            ["--routing-overlap", "--backend cuda"],
        ),
        (
            ["bench", "--random", "gemma-4-31b", *CUDA, "--routing-overlap", "0.4"],
            ["--routing-overlap", "mixture of experts", "gemma-4-31b"],
        ),
        (
            ["bench", "--random", "gemma-4-26b-a4b", *CUDA, "--routing-overlap", "0.9"],
            ["--routing-overlap", "0.12", "0.80", "0.9"],
        ),
        (["bench", "--batches", "0,2"], ["--batches", "0"]),
        (["bench", "--batches", "two"], ["--batches", "two"]),
        (["bench", "--widths", "33", "--slots", "1"], ["K must be 0 to 31", "32"]),
        (["bench", "--contexts", "4000"], ["--contexts", "--max-len 4096"]),
        (["bench", "--prompt-lengths", "4096"], ["--prompt-lengths", "4097"]),
        (["bench", "--repeats", "0"], ["--repeats"]),
        (["bench", "--drafter", "ngram", "--synthetic-tau", "7"], ["--synthetic-tau", "5"]),
        (["bench", "--acceptance", "0.5"], ["--acceptance", "--script"]),
        (["bench", "--script", __file__, "--synthetic-tau", "2"], ["--synthetic-tau", "--script"]),
        (
            ["bench", "--script", __file__, "--acceptance", "0.5,0.6"],
            ["--acceptance: ", "0.5, 0.6"],
        ),
        (["bench", "--script", "/nowhere.jsonl"], ["--script", "/nowhere.jsonl"]),
        (["bench", "--plot", "/proc/x/y.png"], ["/proc/x"]),
        (["generate", PROMPT, "--dtype", "fp8"], ["--dtype fp8", "--backend cuda", "--int8"]),
        (["generate", PROMPT, "--dtype", "fp8-w8a8"], ["--dtype fp8-w8a8", "--backend cuda"]),
        (["generate", PROMPT, "--kv-dtype", "fp8"], ["--kv-dtype", "--backend cuda"]),
        (["generate", PROMPT, *CUDA, "--kv-dtype", "int8"], ["int8", "fp8"]),
        (["serve", "--port", "0", "--device", "cpu"], ["--device", "--backend cuda"]),
        (["doctor", "--backend", "cuda", "--device", "cpu", "--tp", "2"], ["--tp", "needs GPUs"]),
        (["generate", PROMPT, "--prefill-copy"], ["--prefill-copy", "--backend cuda"]),
        (["generate", PROMPT, "--max-tokens", "0"], ["--max-tokens", "1 or more", "0"]),
        (["generate", "caf\udce9"], ["the prompt", "character 4", "UTF-8"]),
        (["generate", PROMPT, *CUDA, "--prefill-copy"], ["--prefill-copy", "--device cpu"]),
        (["perplexity", __file__, "--backend", "cuda", "--int8"], ["--int8", "--dtype fp8"]),
        (["generate", PROMPT, *CUDA, "--loop", "device"], ["--loop device", "--device cpu"]),
        (["generate", PROMPT, *CUDA, "--max-len", "8"], ["--max-len"]),
    ],
)
def test_mistakes_are_one_line_and_exit_2(capsys, arguments, words):
    line = refused(capsys, *arguments)
    assert all(word in line for word in words), line


def test_an_unknown_toml_key_is_named(capsys, tmp_path):
    config = tmp_path / "bad.toml"
    config.write_text("draftr = 'ngram'\n")
    assert "draftr" in refused(capsys, "generate", PROMPT, "--config", str(config))


def test_a_port_in_use_is_said_before_loading(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = refused(capsys, "serve", "--port", port, "--model", "/nowhere")
        assert port in line and "--port" in line


def test_no_git_is_no_error(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    out, _ = run(capsys, "generate", PROMPT, "--max-tokens", "2", "--json")
    assert json.loads(out.splitlines()[-1])["git"] is None
