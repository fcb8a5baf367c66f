"""Acceptance is replayed from one recording, and is that of real runs; what is miswired or not
lossless shows in a receipt."""

from __future__ import annotations

import json
from functools import partial

import pytest

from specdec.core import cycle as cycles
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.evaluation.record import record
from specdec.report import acceptance, equality, notes
from specdec.report.profile import K
from specdec.report.replay import replayed
from specdec.report.subject import Condition
from tests.specdec.report.receipts import SHORT, VOCAB, WORD, Clairvoyant, fake_subject
from tests.support.fakes import FakeTarget

GREEDY = Condition(0.0, False)
IDENTITY = {"assistant": "assistant", "arch": "26B-A4B"}


@pytest.fixture(scope="module")
def sections():
    subject = fake_subject()
    found = acceptance.measure(subject)
    return json.loads(
        json.dumps({"acceptance": found, "equality": equality.measure(subject, found)})
    )


def test_equal_answers_and_equal_taus(sections):
    rows = sections["equality"]["rows"]
    assert [(r["temperature"], r["thinking"]) for r in rows] == [
        (0.0, False), (1.0, False), (0.0, True), (1.0, True),
    ]  # fmt: skip
    for row in rows:
        assert row["equal"] and row["first_difference"] is None
        assert row["plain_sha256"] == row["drafted_sha256"] == row["recorded_sha256"]
        assert row["run_tau"] == row["replay_tau"] > 1.5 and row["taus_agree"]
    assert len({row["plain_sha256"] for row in rows}) > 1


@pytest.mark.parametrize("k", [1, 2, 5, K])
def test_a_replay_counts_as_a_run_does(k):
    """Every count of every prompt, by position and by length, not only tau."""
    subject = fake_subject()
    questions, _ = subject.questions(GREEDY)
    recordings = record(subject.engine("assistant"), questions, subject.settings(GREEDY))
    target = FakeTarget(slots=3, vocab=VOCAB, max_len=800)
    drafter = Clairvoyant(wired=True)
    engine = Engine(target, drafter, host_cycle(target, drafter, k))
    seqs = [q.sequence(subject.settings(GREEDY), subject.profile.max_tokens) for q in questions]
    engine.run_to_end(seqs)
    outcomes = replayed(recordings, k, None)
    assert [o.acceptance for o in outcomes] == [seq.acceptance for seq in seqs]
    assert [list(o.tokens) for o in outcomes] == [s.tokens[s.prompt_len :] for s in seqs]


def test_rows_by_category_drafter_depth_and_length(sections):
    rows = sections["acceptance"]["rows"]
    assert {row["drafter"] for row in rows} == {"ngram", "assistant"}
    assert {row["k"] for row in rows} == {1, K}
    assert {row["category"] for row in rows} == {"all", "coding", "math"}
    assert {row["context"] for row in rows} == {"all", "0 – 512", "512 – 1,024"}
    for row in rows:
        assert row["low"] <= row["tau"] <= row["high"]
        assert sum(row["acceptance_histogram"]) == row["num_spec_steps"] <= row["verify_passes"]
        assert len(row["per_position_acceptance_rates"]) == row["k"]
    whole = [r for r in rows if (r["drafter"], r["k"], r["category"]) == ("assistant", K, "all")]
    for condition in sections["acceptance"]["conditions"]:
        own = [r for r in whole if r["thinking"] == condition["thinking"]]
        own = {r["context"]: r for r in own if r["temperature"] == condition["temperature"]}
        parts = [row for name, row in own.items() if name != "all"]
        assert sum(row["tokens"] for row in parts) == own["all"]["tokens"]


def test_no_prompt_and_no_answer_is_in_them(sections):
    text = json.dumps(sections)
    assert WORD not in text and "request_id" not in text
    assert '"tokens": [' not in text and '"answer"' not in text


def noted(subject, identity=IDENTITY):
    found = acceptance.measure(subject)
    return list(notes._wiring(identity, found))


def test_a_miswired_assistant_is_warned_of():
    (note,) = noted(fake_subject(40, SHORT, wired=False))
    assert note["code"] == "wiring" and "smells of wiring" in note["sentence"]
    assert "84 % of 26B-A4B's first guesses" in note["sentence"]
    assert note["numbers"]["first_guess"] == 0 and note["numbers"]["category"] == "coding"
    assert not noted(fake_subject(40, SHORT, wired=True))


def test_few_prompts_prove_no_fault_and_all_together_stand_in_for_code():
    assert not noted(fake_subject(8, SHORT, wired=False))
    (note,) = noted(fake_subject(24, SHORT, wired=False), IDENTITY | {"arch": "E4B"})
    assert note["numbers"]["category"] == "all" and "no figure of this size" in note["sentence"]


def test_a_sabotaged_accept_rule_is_found(monkeypatch):
    subject = fake_subject()
    found = acceptance.measure(subject)

    def greedy(draft, chosen):
        right = (draft == chosen[:, : draft.shape[1]]).cumprod(1).sum(1)
        return (right + 1).clip(max=draft.shape[1])

    monkeypatch.setattr(cycles, "cycle", partial(cycles.cycle, accept=greedy))
    section = equality.measure(subject, found)
    speed = {"rows": [{"equal": True, "drafter": "auto", "users": 1}]}
    sections = {"equality": section, "speed": speed}
    assert not notes.equal(sections)
    row = section["rows"][0]
    assert row["plain_sha256"] != row["drafted_sha256"]
    assert row["first_difference"].keys() == {"prompt", "position"}
    codes = {note["code"] for note in notes._differing(sections)}
    assert codes == {"differs"}


def test_random_weights_have_no_acceptance_and_say_so():
    subject = fake_subject(random=True)
    found = acceptance.measure(subject)
    assert found["rows"] == [] and "random weights" in found["why_not"]
    assert all(row["equal"] for row in equality.measure(subject, found)["rows"])
