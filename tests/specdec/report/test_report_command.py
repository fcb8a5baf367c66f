"""`specdec report` as a user types it, on a tiny model; and how it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from specdec.core.errors import UserError
from specdec.evaluation.prompts import Prompt, thinking_prompts
from specdec.report import parity, profile, run, transformers_scores
from targets import mini
from targets.backend import meter_of
from targets.cuda.load import CudaOptions, load_target
from tests.specdec.report.receipts import SHORT, fake_receipt_steps
from tests.support.commands import refused, run as typed

pytestmark = pytest.mark.usefixtures("cheap_programs")

LENGTH = 12
"""Tokens of timed answers."""
SECRET = "a-customers-secret"
CHATS = [
    {"category": category, "messages": [{"role": "user", "content": f"{SECRET} {number}"}]}
    for number, category in enumerate(("coding", "math", "math"))
]


def agreeing(request):
    """transformers' scores, had it computed as this engine does but for one token."""
    assert Path(request["folder"]).is_absolute() and request["dtype"] == "float32"
    texts = []
    for text in request["texts"]:
        best = text["ids"][text["prompt_len"] :]
        texts.append(
            {"logprobs": text["logprobs"], "best": best, "best_logprobs": text["logprobs"]}
        )
    texts[1]["best"][2] += 1
    texts[1]["best_logprobs"] = [value + 0.5 for value in texts[1]["logprobs"]]
    return {"texts": texts, "version": "5", "device": "cpu"}


@pytest.fixture(scope="module")
def told(worded, tmp_path_factory):
    """A folder with a model's files, prompts and a text, each in a folder of a telling name."""
    home = tmp_path_factory.mktemp(SECRET)
    model = home / "model"
    shutil.copytree(worded, model)
    shutil.copy(mini.path("mini") / "chat_template.jinja", model)
    prompts, text = home / "prompts.jsonl", home / "text.txt"
    prompts.write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    text.write_text(f"{SECRET} is not to be shown. " * 9)
    options = ["--model", str(model), "--assistant", "none", "--prompts", str(prompts)]
    return [*options, "--text", str(text), "--slots", "2", "--max-len", "256"]


def test_a_receipt_of_a_tiny_model(capsys, monkeypatch, told, tmp_path):
    monkeypatch.setattr(parity, "_scores", agreeing)
    monkeypatch.setattr(profile, "CPU_OUTPUT", LENGTH)
    monkeypatch.setitem(profile.PROFILES, "quick", SHORT)
    out = tmp_path / "receipt"
    printed, shown = typed(capsys, "report", *told, "--out", str(out), "--json")
    receipt = json.loads((out / "report.json").read_text())
    assert json.loads(printed.splitlines()[-1]) == receipt and receipt["equal"]
    assert "answers equal plain decoding" in shown
    _check_sections(receipt)
    for file in out.rglob("*"):
        text = file.read_text() if file.is_file() else ""
        assert SECRET not in text and str(tmp_path.parent) not in text, file
    assert sorted(path.stem for path in (out / "parts").iterdir()) == sorted(run.ORDER)
    again, shown = typed(capsys, "report", *told, "--out", str(out), "--json")
    assert "continues: 8 of 8 sections are there" in shown
    again = json.loads(again.splitlines()[-1])
    assert again | {"made": 0} == receipt | {"made": 0}
    _check_difference(capsys, out)
    line = refused(capsys, "report", *told, "--out", str(out), "--profile", "full")
    assert "sections of other options" in line


def _check_sections(receipt):
    identity = receipt["identity"]
    assert identity["schema_version"] == 1 and identity["prompts"] == 3 and identity["slots"] == 2
    assert {file["name"] for file in identity["files"]} >= {"config.json", "model.safetensors"}
    assert "argv" not in identity and identity["assistant"] is None
    conditions = [(r["temperature"], r["thinking"]) for r in receipt["equality"]["rows"]]
    assert conditions == [(0, False), (1, False), (0, True), (1, True)]
    assert all(row["taus_agree"] is not False for row in receipt["equality"]["rows"])
    speed = receipt["speed"]["rows"]
    assert {(row["drafter"], row["users"]) for row in speed} == {
        (drafter, 1) for drafter in ("none", "suffix", "auto")
    }
    for row in speed:
        assert row["output_len"] == LENGTH and row["equal"]
        assert 0 < row["median_ttft_ms"] < row["median_e2el_ms"]
    compared = receipt["parity"]
    assert compared["compared"] and 0.9 < compared["top1_agreement"] < 1
    assert compared["first_difference"]["margin"] == pytest.approx(0.5)
    assert compared["max_abs_dlogprob"] == 0
    assert receipt["perplexity"]["tokens"] > 9 and receipt["memory"]["peak_rss"] > 1 << 20
    assert receipt["memory"]["weights"] > receipt["memory"]["cache"] > 1 << 10
    assert {note["code"] for note in receipt["skipped"]} == {"memory", "users"}


def _check_difference(capsys, out):
    printed, shown = typed(capsys, "report", "diff", str(out), str(out / "report.json"), "--json")
    found = json.loads(printed.splitlines()[-1])
    assert "identities: equal" in shown and not found["identities"]
    assert all(row["equal"] for row in found["digests"])
    assert all(row["ratio"] in (1, None) for row in found["ratios"])


def test_differing_answers_end_with_exit_code_1(capsys, monkeypatch, tmp_path):
    sections = {**fake_receipt_steps(), "parity": {"compared": False, "why_not": "it was not run"}}
    found = {"made": "now", **sections, "equal": False, "warnings": [], "skipped": []}
    monkeypatch.setattr(run, "measure", lambda *_: found)
    with pytest.raises(SystemExit) as stop:
        typed(capsys, "report", "--out", str(tmp_path))
    assert stop.value.code == 1 and "ANSWERS DIFFER" in capsys.readouterr().err
    assert "DIFFER" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--out"),
        (["--out", "/proc/x"], "--out: cannot write"),
        (["--profile", "slow"], "quick"),
        (["--prompts", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--text", "/nowhere.txt"], "/nowhere.txt"),
        (["--text", "/dev/null"], "is empty"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--assistant", "/nowhere"], "/nowhere"),
        (["--random", "gemma-9"], "gemma-9"),
        (["--backend", "tpu9"], "tpu9"),
        (["diff", "/nowhere", "/nowhere"], "is no receipt"),
    ],
)
def test_mistakes_are_one_line(capsys, tmp_path, arguments, words):
    if arguments and arguments[0] != "diff" and "--out" not in arguments:
        arguments = ["--out", str(tmp_path / "receipt"), *arguments]
    assert words in refused(capsys, "report", *arguments)


def test_thinking_is_of_chats():
    chat = Prompt("c", "any", "chat", messages=({"role": "user", "content": "a"},))
    (thinking,) = thinking_prompts([chat])
    seen = []
    thinking.encode(lambda text: [], lambda messages, **options: seen.append(options) or [])
    chat.encode(lambda text: [], lambda messages, **options: seen.append(options) or [])
    assert seen == [{"enable_thinking": True}, {}]
    with pytest.raises(UserError, match="--thinking is of chats: prompt p"):
        thinking_prompts([chat, Prompt("p", "any", "plain", "text")])


class Scored:
    """A model of transformers' form whose best token at each place is the one before, plus 1."""

    device = "cpu"

    def __call__(self, ids):
        import torch

        logits = torch.nn.functional.one_hot((ids + 1) % 9, 9).float() * 5
        return type("Output", (), {"logits": logits})


def test_scores_are_of_the_tokens_behind_the_prompt():
    scores = transformers_scores._scored(Scored(), [3, 4, 5, 8], prompt_len=2)
    assert scores["best"] == [5, 6]
    right, wrong = scores["logprobs"]
    assert scores["best_logprobs"] == [right, pytest.approx(right)] and wrong < right


def test_a_device_is_given_back_before_transformers_runs(monkeypatch):
    from specdec.cli import report

    started = []
    monkeypatch.setattr(report.os, "execv", lambda *arguments: started.append(arguments))
    typed_ = ["python3", "/usr/bin/specdec", "report", "--out", "x"]
    monkeypatch.setattr(report.sys, "orig_argv", typed_)
    report._again(False)
    assert not started
    report._again(True)
    ((_, command),) = started
    assert command[1:] == typed_[1:]
    assert Path(command[0]).name.startswith("python")


def test_the_references_have_the_sizes_of_a_card(tiny):
    """On a CPU what is in use is unknown, and what weights and cache take is not."""
    target = load_target(tiny["31b"], CudaOptions(slots=1, max_len=64, device="cpu"))
    weights, cache = meter_of(target).sizes()
    assert weights > 0 < cache and meter_of(target).memory() is None
