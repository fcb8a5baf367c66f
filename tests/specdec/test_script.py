"""Scripted decoding: both loops emit the script with any guesses; lookup finds its matches in it,
and drafters with weights are right as often as recorded."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from drafters.lookup.jax import TracedLookup
from drafters.ngram.host import NgramDrafter
from drafters.none.host import NoDrafter
from specdec.bench import timing as bench
from specdec.bench.script_file import read_script
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.errors import UserError
from specdec.core.script import (
    Line,
    Script,
    ScriptedDrafter,
    ScriptedTarget,
    drawn_right,
    recorded_draft,
    right_for_tau,
)
from specdec.core.types import NO_GUESS, Sequence
from targets.cuda.ops import Rows
from targets.cuda.script import PlacedScript
from targets.jax.device_drafter import TextDrafter
from targets.jax.device_loop import device_loop
from targets.jax.load import JaxOptions, load_target
from tests.support.commands import CUDA, refused, run
from tests.support.fakes import FakeTarget, Noise
from tests.support.scripts import ANSWERS, SHARES, decode_script

pytestmark = pytest.mark.usefixtures("cheap_programs")


@pytest.mark.parametrize("k", [0, 1, 3, 7])
def test_the_script_is_said_whatever_is_guessed(k):
    for drafter in (NoDrafter(), NgramDrafter(1, 3), Noise(50), Noise(50, wild=True)):
        said, acceptance = decode_script(FakeTarget(), drafter, k)
        assert said == ANSWERS
        assert isinstance(drafter, NgramDrafter) == (acceptance.tau > 1.5) or k < 3


def test_a_request_without_a_line_says_what_the_target_chooses():
    target = FakeTarget()
    scripted = ScriptedTarget(target, Script({}, 2, target.max_len))
    texts = []
    for asked in (scripted, target):
        seq = Sequence([3, 4], max_tokens=9)
        Engine(asked, NoDrafter(), host_cycle(asked, NoDrafter(), 2)).run_to_end([seq])
        texts.append(seq.tokens)
    assert texts[0] == texts[1]


def test_both_loops_say_it_with_the_same_acceptance(tiny):
    target = load_target(tiny["31b"], JaxOptions(slots=2, max_len=256, k=7, chunk=8))
    traced = TextDrafter(TracedLookup(1, 3))
    for right in (None, lambda count: drawn_right(SHARES, count, seed=1)):
        for predicted in (None, ANSWERS[0]):

            def drive(script):
                return device_loop(target, traced, 3, script=script)

            host = decode_script(target, NgramDrafter(1, 3), 3, right, predicted=predicted)
            assert host == decode_script(target, NgramDrafter(1, 3), 3, right, drive, predicted)
            assert host[0] == ANSWERS


def test_a_recorded_acceptance_is_kept_whatever_the_drafter_guesses():
    right = partial(drawn_right, SHARES, seed=3)
    taus = {
        decode_script(FakeTarget(), drafter, 3, right)[1].tau
        for drafter in (NoDrafter(), Noise(50), NgramDrafter(1, 3))
    }
    assert len(taus) == 1
    useless = decode_script(
        FakeTarget(), NgramDrafter(1, 3), 3, partial(drawn_right, (0.0,) * 3, seed=0)
    )
    assert useless[0] == ANSWERS and useless[1].accepted == 0


def test_drawn_guesses_are_right_as_often_as_was_said():
    right = drawn_right(SHARES, 20_000, seed=0)
    assert [(right >= n).mean() for n in (1, 2, 3)] == pytest.approx(SHARES, abs=0.01)
    assert (right != drawn_right(SHARES, 20_000, seed=1)).any()
    longer = drawn_right((*SHARES, 0.2), 20_000, seed=0)  # whatever K is, the same token is
    assert (np.minimum(longer, 3) == right).all()


@pytest.mark.parametrize("shares", [(), (1.2,), (-0.1,), (0.4, 0.5), (float("nan"),)])
def test_shares_that_are_none_are_refused(shares):
    with pytest.raises(UserError, match="an acceptance must be shares"):
        drawn_right(shares, 3, seed=0)


@pytest.mark.parametrize(
    ("tau", "k"), [(1, 4), (1.3, 1), (2.7, 4), (3, 4), (5, 4), (1, 0), (9, 31)]
)
def test_a_tau_that_was_asked_for_comes_in_short_runs_too(tau, k):
    right = right_for_tau(tau, k, 1000)
    assert right.min() >= 0 and right.max() <= k
    place, kept = 1, []
    while place < 1000 - k:
        kept.append(right[place])
        place += right[place] + 1
    assert np.mean(kept) + 1 == pytest.approx(tau, abs=0.02 * tau)
    assert k == 0 or np.mean(kept[:50]) + 1 == pytest.approx(tau, rel=0.15)


@pytest.mark.parametrize("tau", [0.9, 5.1, float("nan")])
def test_a_tau_out_of_reach_is_refused(tau):
    with pytest.raises(UserError, match="--synthetic-tau must be 1 to K"):
        right_for_tau(tau, 4, count=1)


def test_a_synthetic_tau_comes_end_to_end():
    target = FakeTarget(slots=2)
    answers = bench.random_prompts(2, 200, target.vocab)
    lines = {
        str(i): Line(answer, right_for_tau(2.7, 4, 200, seed=i)) for i, answer in enumerate(answers)
    }
    script = Script(lines, 2, target.max_len)
    scripted, drafter = ScriptedTarget(target, script), ScriptedDrafter(NoDrafter(), script)

    def make_engine() -> Engine:
        return Engine(scripted, drafter, host_cycle(scripted, drafter, 4))

    run = bench.end_to_end("tau 2.7", make_engine, [[1, 2], [3]], max_tokens=200)
    assert run.tau == pytest.approx(2.7, rel=0.03) and run.tokens == 400


@given(st.integers(0, 4), st.lists(st.integers(-1, 3), min_size=4, max_size=4))
def test_a_recorded_draft_is_wrong_behind_what_is_right(right, own):
    said = np.array([[3, 0, 1, 0]], np.int32)
    own = np.array([own], np.int32)
    draft = recorded_draft(said, np.array([right]), own, np.arange(4))
    assert (draft[0, :right] == said[0, :right]).all()
    assert (draft[0, right:] != said[0, right:]).all()
    differ = (own != said)[0, right:]
    assert (draft[0, right:][differ] == own[0, right:][differ]).all()


def test_the_captured_cycles_tables_are_the_hosts():
    """Their operations, on a CPU; the graph itself is test_cuda_card_engine.py's."""
    answer = list(range(10, 30))
    script = Script({"a": Line(answer, drawn_right(SHARES, 20, seed=0))}, 3, 64)
    placed = PlacedScript(script, torch.device("cpu"))
    seq = Sequence([1, 2, 3], request_id="a", slot=2)
    script.seat(seq)
    placed.seat([2])
    seq.tokens += answer[:5]

    def one(*values):
        return torch.tensor(values, dtype=torch.int32)

    rows = Rows(torch.zeros(2, 5, dtype=torch.int32), one(len(seq.tokens) - 1, 0), one(2, -1))
    assert placed.coming(rows, 5)[0].tolist() == answer[5:10] == script.coming(seq, 5).tolist()
    assert placed.right(rows)[0] == script.right[2, len(seq.tokens)]
    own = torch.full((2, 4), NO_GUESS, dtype=torch.int32)
    draft = recorded_draft(placed.coming(rows, 4), placed.right(rows), own, torch.arange(4))
    assert draft.dtype == torch.int32 and draft.shape == (2, 4)


def encode(text: str) -> list[int]:
    return [2, *map(ord, text)]


def encode_bare(text: str) -> list[int]:
    return list(map(ord, text))


def test_files_are_read(tmp_path):
    lines = tmp_path / "a.jsonl"
    full = {"prompt": "ab", "answer": "cde", "prediction": "cd", "acceptance": [0.5, 0.25]}
    lines.write_text(json.dumps(full) + "\n\n" + json.dumps({"prompt": "x", "answer": "yz"}))
    first, second = (row.encode(encode, encode_bare, 2) for row in read_script(lines))
    assert first.prompt == [2, 97, 98] and first.answer == [99, 100]
    assert first.prediction == [99, 100] and first.acceptance == (0.5, 0.25)
    assert (second.prediction, second.acceptance) == (None, None)
    text = tmp_path / "a.txt"
    text.write_text("abcdefg")
    (row,) = (row.encode(encode, encode_bare, None) for row in read_script(text))
    assert row.prompt == encode("abc") and row.answer == encode_bare("defg")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("{", "a.jsonl:1 is not JSON"),
        ("[1]", "a.jsonl:1 must be an object"),
        ('{"prompt": "x"}', "a.jsonl:1 must be an object"),
        ('{"prompt": "x", "answer": ""}', "'answer' must be a text"),
        ('{"prompt": "x", "answer": "y"}', "at least 2 tokens"),
        ('{"prompt": "x", "answer": 3}', "'answer' must be a text"),
        ('{"prompt": "x", "answer": "yy", "predicted": "y"}', "unknown key 'predicted'"),
        ('{"prompt": "x", "answer": "yy", "acceptance": 0.5}', "must be a list of numbers"),
        ('{"prompt": "x", "answer": "yy", "acceptance": [true]}', "must be a list of numbers"),
        ('{"prompt": "x", "answer": "yy", "acceptance": [0.1, 0.2]}', "0.1, 0.2"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, text, words):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(UserError) as refusal:
        for row in read_script(path):
            row.encode(encode, encode_bare, None)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


ROWS = [
    {"prompt": "one two three", "answer": " one two three one two three", "prediction": " one two"},
    {"prompt": "def f(x):", "answer": "\n    return f(x - 1)\n\n\ndef f(x):\n    return f(x)"},
]


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


@pytest.mark.parametrize(
    "backend",
    [[], pytest.param(["--loop", "device"], marks=pytest.mark.slow), CUDA],
    ids=str,
)
def test_bench_says_a_script(capsys, script, worded, backend):
    arguments = ["bench", "--script", str(script), "--model", str(worded), "--max-len", "256"]
    arguments += ["--drafter", "ngram", "--batches", "1,2", "--ks", "2,4", "--repeats", "2"]
    arguments += [*backend, "--json"]
    out, shown = run(capsys, *arguments)
    document = json.loads(out.splitlines()[-1])
    assert document["equal"] and "all answers equal the script" in shown
    points = [(row["drafter"], row["k"], row["predicted"]) for row in document["script"]]
    drafted = [("ngram", k, predicted) for k in (2, 4) for predicted in (False, True)]
    assert sorted(points) == sorted([("none", 0, False), *drafted] * 2)
    plain, *rest = document["script"]
    assert plain["tau"] == plain["over_plain"] == 1
    assert all(row["tau"] > 1.1 and row["tokens_per_second"] > 0 for row in rest[1:])


def test_what_does_not_go_with_a_script(capsys, script, tmp_path):
    base = ["bench", "--script", str(script), "--max-len", "256"]
    assert "--acceptance is of drafters with weights" in refused(
        capsys, *base, "--drafter", "ngram", "--acceptance", "0.5,0.4,0.3,0.2"
    )
    assert "has 2 positions, but up to 4" in refused(
        capsys, *base, "--acceptance", "0.5,0.4", "--drafter", "eagle3"
    )
    assert "--batches 3: the script has 2 requests" in refused(capsys, *base, "--batches", "1,3")
    assert "does not fit --max-len 16" in refused(
        capsys, "bench", "--script", str(script), "--max-len", "16", "--contexts", "1"
    )
