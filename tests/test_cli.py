"""The command line as a user types it: text, statistics, JSON, and one line for each mistake."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from specdec.cli import main
from targets.cuda.machine import Machine

PROMPT = "def add(first, second):\n    return"
CUDA = ["--backend", "cuda", "--device", "cpu"]
"""The CUDA target on its references, which need no GPU."""


def run(capsys, *arguments) -> tuple[str, str]:
    main(list(arguments))
    captured = capsys.readouterr()
    return captured.out, captured.err


def refused(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    captured = capsys.readouterr()
    assert stop.value.code == 2 and not captured.out
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("specdec: "), captured.err
    return lines[0]


def test_generate_streams_text_and_ends_with_json(capsys):
    out, err = run(capsys, "generate", PROMPT, "--max-tokens", "12", "--json", "--slots", "1")
    *text, last = out.splitlines()
    document = json.loads(last)
    assert "\n".join(text) == PROMPT + document["text"]
    assert document["tokens"] <= 12 and document["tau"] >= 1
    assert document["config"]["speculation"]["drafter"] == "ngram"
    assert "embedded" in err and "tau" in err and "tok/s" in err


def test_drafter_k_and_loop_do_not_change_the_text(capsys):
    base = ["generate", PROMPT, "--max-tokens", "16", "--json", "--slots", "1", "--seed", "3"]
    variants = [["--drafter", "none"], ["--k", "7"], ["--loop", "device"]]
    texts = {json.loads(run(capsys, *base, *v)[0].splitlines()[-1])["text"] for v in variants}
    assert len(texts) == 1


def test_toml_then_flags_and_the_vllm_alias(capsys, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text('drafter = "none"\nk = 2\nmax_tokens = 4\nslots = 1\n')
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
    out, _ = run(capsys, "doctor", "--json", "--slots", "2")
    document = json.loads(out.splitlines()[-1])
    assert document["healthy"] and document["verdict"] == "sound"
    assert all(check["differing"] == 0 for check in document["checks"])


def test_eval_acceptance_reports_and_proves_equality(capsys, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def f(x):"}\n{"prompt": "import os\\nimport sys\\n"}\n')
    arguments = ["eval-acceptance", str(prompts), "--max-tokens", "24", "--out", str(tmp_path)]
    out, err = run(capsys, *arguments, "--slots", "2", "--temperature", "0.8", "--json")
    document = json.loads(out.splitlines()[-1])
    assert document["equality"]["equal"] and document["overall"]["tau"] >= 1
    assert json.loads((tmp_path / "report.json").read_text())["overall"] == document["overall"]
    assert (tmp_path / "report.png").stat().st_size > 10_000
    assert "plain, width 1" in document["speeds"]


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
        (["bench", "--batches", "0,2"], ["--batches", "0"]),
        (["bench", "--batches", "two"], ["--batches", "two"]),
        (["bench", "--widths", "33", "--slots", "1"], ["K must be 0 to 31", "32"]),
        (["bench", "--contexts", "2000"], ["--contexts", "--max-len 2048"]),
        (["bench", "--prompt-lengths", "4096"], ["--prompt-lengths", "4097"]),
        (["bench", "--repeats", "0"], ["--repeats"]),
        (["bench", "--synthetic-tau", "7"], ["--synthetic-tau", "5"]),
        (["bench", "--synthetic-tau", "2", "--loop", "device"], ["--synthetic-tau", "host"]),
        (["bench", "--plot", "/proc/x/y.png"], ["/proc/x"]),
        (["generate", PROMPT, "--dtype", "fp8"], ["--dtype fp8", "--backend cuda", "--int8"]),
        (["generate", PROMPT, "--kv-dtype", "fp8"], ["--kv-dtype", "--backend cuda"]),
        (["serve", "--port", "0", "--device", "cpu"], ["--device", "--backend cuda"]),
        (["doctor", "--backend", "cuda", "--tp", "2"], ["--tp", "--backend jax"]),
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


@pytest.fixture
def few_samples(monkeypatch):
    for name, value in {"STEPS": 3, "CYCLE_SAMPLES": 2, "FIRST_TOKENS": 2}.items():
        monkeypatch.setattr(f"specdec.bench.{name}", value)
    monkeypatch.setattr("targets.cuda.roofline.GROUPS", 3)


@pytest.mark.usefixtures("few_samples")
def test_bench_times_steps_and_compares_texts(capsys, tmp_path):
    receipt = tmp_path / "receipt.json"
    arguments = ["bench", "--slots", "2", "--contexts", "40", "--max-tokens", "12"]
    arguments += ["--repeats", "1", "--prompt-lengths", "16", "--max-len", "256"]
    out, _ = run(capsys, *arguments, "--out", str(receipt), "--json")
    document = json.loads(out.splitlines()[-1])
    assert document == json.loads(receipt.read_text())
    assert document["equal"] and len(document["runs"]) == 4
    assert {(s["batch"], s["width"]) for s in document["steps"]} == {(1, 1), (1, 8), (2, 1), (2, 8)}


@pytest.mark.usefixtures("few_samples")
def test_bench_of_the_cuda_target_with_a_synthetic_tau_and_a_peer(capsys, tmp_path):
    receipt, plot = tmp_path / "receipt.json", tmp_path / "plot.png"
    arguments = ["bench", *CUDA, "--batches", "1,2", "--contexts", "30", "--widths", "1,3"]
    arguments += ["--k", "2", "--prompt-lengths", "16", "--synthetic-tau", "2", "--max-len", "256"]
    arguments += ["--max-tokens", "8", "--peer", "transformers", "--plot", str(plot)]
    out, err = run(capsys, *arguments, "--out", str(receipt), "--json")
    document = json.loads(out.splitlines()[-1])
    assert document == json.loads(receipt.read_text()) and document["equal"]
    steps = document["steps"]
    assert {(s["batch"], s["width"]) for s in steps} == {(1, 1), (1, 3), (2, 1), (2, 3)}
    assert all(len(s["samples"]) == len(s["forward"]["samples"]) == 2 for s in steps)
    cycles = document["cycles"]
    assert {(c["drafter"], c["width"]) for c in cycles} == {("none", 1), ("ngram", 3)}
    assert [run["tau"] > 1 for run in document["synthetic"]] == [True, True]
    assert len(document["read_bandwidths"]) == 2 and plot.stat().st_size > 10_000
    assert all(run.get("tokens_per_second") for run in document["peer"]["runs"]), document["peer"]
    assert "transformers, prompt lookup, batch 1" in err


def test_cuda_references_say_the_same_whatever_the_drafter(capsys, tmp_path):
    base = ["generate", PROMPT, "--max-tokens", "10", "--json", "--slots", "1", *CUDA]
    base += ["--temperature", "0.8", "--seed", "3"]
    variants = [["--drafter", "none"], [], ["--k", "7"]]
    texts = {json.loads(run(capsys, *base, *v)[0].splitlines()[-1])["text"] for v in variants}
    assert len(texts) == 1
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def f(x):"}\n{"prompt": "import os\\nimport sys\\n"}\n')
    arguments = ["eval-acceptance", str(prompts), "--max-tokens", "12", "--slots", "2", *CUDA]
    document = json.loads(run(capsys, *arguments, "--json")[0].splitlines()[-1])
    assert document["equality"]["equal"] and list(document["speeds"]) == ["plain", "drafted"]
    assert document["device"] == "cpu: torch references"


def test_cuda_references_score_and_check_as_jax_does(capsys, tmp_path):
    text = tmp_path / "text.py"
    text.write_text(PROMPT * 10)
    arguments = ["perplexity", str(text), "--window", "64", "--stride", "32", "--json"]
    ours, theirs = (
        json.loads(run(capsys, *arguments, *backend)[0].splitlines()[-1]) for backend in (CUDA, [])
    )
    assert ours["nll"] == pytest.approx(theirs["nll"], abs=1e-4)
    assert ours["tokens"] == theirs["tokens"]
    out, _ = run(capsys, "doctor", *CUDA, "--json", "--slots", "2")
    assert json.loads(out.splitlines()[-1])["healthy"]


def test_cuda_without_a_gpu_is_one_line(capsys, monkeypatch):
    nothing = Machine("2.13.0", "13.0", None)
    monkeypatch.setattr("targets.cuda.machine.find_machine", lambda: nothing)
    assert "no NVIDIA GPU" in refused(capsys, "serve", "--port", "0", "--backend", "cuda")


def test_cuda_refuses_what_will_not_fit_before_it_loads(capsys, monkeypatch):
    monkeypatch.setattr("targets.cuda.machine.check_device", lambda: None)
    monkeypatch.setattr("targets.cuda.machine.free_bytes", lambda: 40 * 2**30)
    arguments = ["bench", "--random", "gemma-4-31b", "--backend", "cuda", "--dtype", "fp8"]
    line = refused(capsys, *arguments, "--max-len", "8192", "--slots", "16")
    assert "40.0 GiB are free" in line and "--slots 3 would fit" in line


def test_neither_backend_needs_the_other_framework():
    code = (
        "import sys; sys.modules[{absent!r}] = None\n"
        "from specdec.cli import main\n"
        "main(['generate', 'def f', '--max-tokens', '3', '--slots', '1', '--json', *{options!r}])"
    )
    for absent, options in (("jax", CUDA), ("torch", [])):
        script = code.format(absent=absent, options=options)
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_no_git_is_no_error(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    out, _ = run(capsys, "generate", PROMPT, "--max-tokens", "2", "--slots", "1", "--json")
    assert json.loads(out.splitlines()[-1])["git"] is None
