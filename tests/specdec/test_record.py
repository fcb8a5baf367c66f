"""Recordings of drafters with weights cover cycles that begin at any token; replayed by `bench
--script` they give the drafter's own tokens per cycle."""

from __future__ import annotations

import json

import numpy as np
import pytest

from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.errors import UserError
from specdec.core.script import (
    Line,
    Script,
    ScriptedDrafter,
    ScriptedTarget,
    recorded_right,
    right_text,
)
from specdec.core.types import Proposal, Sampling
from specdec.evaluation.prompts import Prompt
from specdec.evaluation.record import record, script_row
from specdec.evaluation.run import Question, Settings
from tests.support.commands import CUDA, refused, run
from tests.support.fakes import FakeTarget, Noise

pytestmark = pytest.mark.usefixtures("cheap_programs")

K = 3
TOKENS = 30
QUESTIONS = [
    Question(Prompt(str(i), "any", "plain", "x"), (3, 4, 5 + i), Sampling(seed=i)) for i in range(3)
]


class Fickle(NoDrafter):
    """Guesses plain decoding's tokens; how many are right is a function of the text's length."""

    def __init__(self, texts: dict[int, list[int]]) -> None:
        self.texts = texts

    def propose(self, seqs, k):
        draft = np.zeros((len(seqs), k), np.int32)
        for b, seq in enumerate(seqs):
            at = len(seq.tokens)
            coming = (self.texts[seq.tokens[2]] + [0] * k)[at : at + k]
            wrong = [token + 1 for token in coming]
            draft[b] = coming[: self.right(at)] + wrong[self.right(at) :]
        return Proposal(draft)

    @staticmethod
    def right(at: int) -> int:
        return at * 7 % (K + 2)


def engine_of(drafter, k, target=None):
    target = target or FakeTarget()
    return Engine(target, drafter, host_cycle(target, drafter, k))


def answered(engine):
    seqs = [question.sequence(Settings("fickle", K), TOKENS) for question in QUESTIONS]
    engine.run_to_end(seqs)
    return seqs


@pytest.fixture(scope="module")
def texts():
    return {seq.tokens[2]: seq.tokens for seq in answered(engine_of(NoDrafter(), 0))}


@pytest.fixture(scope="module")
def recordings(texts):
    return record(engine_of(Fickle(texts), K), QUESTIONS, Settings("fickle", K, TOKENS))


def test_a_recording_tells_of_every_token(texts, recordings):
    for question, one in zip(QUESTIONS, recordings, strict=True):
        assert list(question.ids) + list(one.answer) == texts[question.ids[2]]
        assert one.right[0] == 0
        for place in range(1, TOKENS):
            guessed = min(Fickle.right(place + 3), K, TOKENS - place)
            assert one.right[place] == guessed


@pytest.mark.parametrize("k", [1, 2, K])
def test_replayed_it_emits_as_many_tokens_a_cycle(texts, recordings, k):
    own = engine_of(Fickle(texts), k)
    answered(own)
    lines = {
        one.question.prompt.id: Line(one.answer, np.array(one.right, np.int32))
        for one in recordings
    }
    target = FakeTarget()
    script = Script(lines, target.slots, target.max_len)
    drafter = ScriptedDrafter(Noise(50), script)
    replay = engine_of(drafter, k, ScriptedTarget(target, script))
    assert [s.tokens for s in answered(replay)] == list(texts.values())
    assert replay.acceptance == own.acceptance and own.acceptance.tau > 1.4


def test_lines_are_read_as_they_were_written(recordings):
    row = script_row([recordings[0], recordings[0]], ["a", "b"], K)
    assert (row["prompt"], row["answer"]) == ([3, 4, 5], list(recordings[0].answer))
    told = row["recorded"]["right"]
    assert told["a"] == told["b"] and recorded_right(told["a"]).tolist() == list(
        recordings[0].right
    )
    assert recorded_right(right_text(range(32))).tolist() == list(range(32))
    with pytest.raises(UserError, match="a digit per token .* got '-'"):
        recorded_right("01-")
    with pytest.raises(ValueError, match="drafters changed the answer"):
        script_row(recordings[:2], ["a", "b"], K)


OWN = ["--drafter", "model", "--draft-sample-method", "greedy", "--k", "3"]


@pytest.fixture(scope="module")
def told(worded, tmp_path_factory):
    """A command that records a tiny model drafted by itself (greedy drafts, sampled target), and
    the script that it writes."""
    folder = tmp_path_factory.mktemp("recorded")
    prompts, script = folder / "prompts.jsonl", folder / "script.jsonl"
    prompts.write_text('{"prompt": "def f(x):"}\n{"prompt": "import os\\nimport sys\\n"}\n')
    return ["eval-acceptance", str(prompts), "--record", str(script)], script


@pytest.mark.parametrize("backend", [["--loop", "device"], CUDA], ids=["jax", "cuda"])
def test_a_command_records_and_another_replays(capsys, told, worded, backend):
    command, script = told
    base = ["--model", str(worded), "--draft-model", str(worded), "--max-len", "256", "--slots"]
    base += ["2", *OWN, *backend]
    asked = [*command, *base, "--temperature", "0.6", "--max-tokens", "24", "--json"]
    out, shown = run(capsys, *asked)
    tau = json.loads(out.splitlines()[-1])["overall"]["tau"]
    assert "2 answers, of 2" in " ".join(shown.split())
    out, _ = run(
        capsys, "bench", "--script", str(script), *base, "--ks", "1,3", "--repeats", "1", "--json"
    )
    replayed = {row["k"]: row["tau"] for row in json.loads(out.splitlines()[-1])["script"]}
    assert replayed[3] == pytest.approx(tau) and 1 == replayed[0] < replayed[1] < replayed[3]


def test_what_can_not_be_recorded(capsys, told, tmp_path):
    command, _ = told
    assert "--record is of drafters with weights" in refused(capsys, *command)
    assert "--record needs --k 1 or more" in refused(
        capsys, *command, "--drafter", "eagle3", "--k", "0"
    )
    command = [*command[:-1], str(tmp_path)]
    assert "name a file" in refused(capsys, *command, "--drafter", "eagle3")


def scripted(tmp_path, *rows):
    path = tmp_path / "script.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return ["bench", "--script", str(path), "--max-len", "256", "--ks", "3"]


ROW = {"prompt": [2, 5], "answer": [5, 6, 7]}


def recorded(right, k=3):
    return ROW | {"recorded": {"k": k, "right": right}}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (ROW | {"recorded": "012"}, '"recorded" must be {"k"'),
        (ROW | {"recorded": {"k": 3, "right": {"eagle3": 3}}}, '"recorded" must be {"k"'),
        (recorded({"eagle3": "0x1"}), "got 'x'"),
        (recorded({"eagle3": "000"}, k=0), '"k" of "recorded" must be 1 to 31'),
        (recorded({"eagle3": "040"}), 'more guesses are "right" than the 3'),
        (recorded({"eagle3": "0"}), "1 tokens of eagle3 were recorded, but the answer"),
        (recorded({"eagle3": "000"}, k=2), "recorded with 2 guesses, but up to 3 are drafted"),
        (ROW | {"answer": [5, 4096]}, "the token id 4096"),
        (ROW | {"answer": [5, True]}, "'answer' must be a text"),
    ],
)
def test_bad_recordings_are_refused_in_one_line(capsys, tmp_path, row, words):
    assert words in refused(capsys, *scripted(tmp_path, row), "--drafter", "eagle3")


def test_an_acceptance_beside_a_recording(capsys, tmp_path):
    command = [*scripted(tmp_path, recorded({"eagle3": "012"})), "--acceptance", "0.5,0.4,0.3"]
    assert "--acceptance has no use here" in refused(capsys, *command, "--drafter", "eagle3")
    both = scripted(tmp_path, recorded({"eagle3": "012"}), ROW)
    assert "--script needs --acceptance" in refused(capsys, *both, "--drafter", "eagle3")
