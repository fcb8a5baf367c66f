"""A receipt is read whole or refused in one line; written and read again it is the same."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import pytest

from drafters.none.host import NoDrafter
from specdec.audit.digests import weight_digests
from specdec.audit.making import Ended, receipt_of
from specdec.audit.receipt import MOST_BYTES, Receipt, read_receipt, shortest
from specdec.constraints.recite import Recite
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.errors import UserError
from specdec.core.prediction import PredictedText
from specdec.core.types import Sampling, Sequence
from specdec.core.version import VERSION
from tests.support.audits import IDENTITY, answers, text_of
from tests.support.fakes_text import CharTokenizer
from tests.support.serving import ServedTarget

SHAPED = Sampling(
    temperature=0.7,
    top_p=0.1,
    min_p=1 / 3,
    repetition_penalty=0.01,
    logit_bias=((3, 0.1), (7, -100.0)),
    seed=2**64 - 1,
    logprobs=0,
)


@pytest.fixture(scope="module")
def receipt() -> Receipt:
    target = ServedTarget()
    engine = Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 0))
    (made,) = answers(engine, [Sequence([0, 5, 6], SHAPED, max_tokens=9)], CharTokenizer())
    return made


def test_a_receipt_is_read_as_it_was_written(receipt):
    again = read_receipt(receipt.to_text().encode())
    assert again == receipt and again.seed == str(2**64 - 1)
    assert again.sampling_of() == replace(SHAPED, min_p=shortest(SHAPED.min_p))
    assert len(again.chosen_logprobs()) == len(again.answer.ids) == 9


def older(receipt: Receipt, number: int) -> dict[str, Any]:
    """As JSON, without what a format before 4 had not."""
    document = receipt.to_json() | {"format": f"specdec-receipt/{number}"}
    del document["arithmetic"]["pictures"]
    return document


def test_older_formats_are_read_and_written_again(receipt):
    first, second, third = (older(receipt, number) for number in (1, 2, 3))
    del first["commitments"], second["commitments"]["sampling"]
    for document in (first, second, third):
        again = read_receipt(text_of(document))
        assert again.answer == receipt.answer and again.to_json() == document


HOSTILE = {
    "id -1": (("answer", "ids", 0), -1),
    "id 2^31": (("answer", "ids", 0), 2**31),
    "id 2^63": (("prompt", "ids", 0), 2**63),
    "id 10^4000": (("answer", "ids", 0), 10**4000),
    "id as text": (("answer", "ids", 0), "5"),
    "id as real": (("answer", "ids", 0), 5.0),
    "no ids": (("answer", "ids"), []),
    "2 million ids": (("answer", "ids"), [0] * 2_000_000),
    "NaN": (("sampling", "temperature"), float("nan")),
    "Infinity": (("sampling", "logit_bias"), [[3, float("inf")]]),
    "a bias twice": (("sampling", "logit_bias"), [[3, 1.0], [3, 1.0]]),
    "temperature -1": (("sampling", "temperature"), -1),
    "seed 2^64": (("seed",), str(2**64)),
    "seed as number": (("seed",), 5),
    "seed with a sign": (("seed",), "-1"),
    "recite": (("constraint",), {"recite": [1, 2, 3]}),
    "an unknown key": (("answer", "bonus"), 1),
    "an unknown part": (("bonus",), {}),
    "another format": (("format",), "specdec-receipt/5"),
    "pictures in the third format": (("format",), "specdec-receipt/3"),
    "no pictures": (("arithmetic", "pictures"), None),
    "commitments in the first format": (("format",), "specdec-receipt/1"),
    "commitments to sampling in the second format": (("format",), "specdec-receipt/2"),
    "no commitments to sampling": (("commitments", "sampling"), None),
    "too few commitments": (("commitments", "logits"), []),
    "too many commitments to sampling": (("commitments", "sampling"), ["0" * 16] * 2),
    "commitments of other blocks": (("commitments", "block"), 16),
    "commitments without log-probabilities": (("logprobs",), None),
    "a list for an object": (("limits",), []),
    "cancelled": (("answer", "finish"), "cancelled"),
    "a text so far": (("answer", "finish"), None),
    "too few log-probabilities": (("logprobs",), "AAAA"),
    "log-probabilities in no base64": (("logprobs",), "?"),
    "an empty bad word": (
        ("constraint",),
        {
            "grammar": None,
            "allowed": None,
            "bad_words": [[]],
            "min_tokens": 0,
            "stop_ids": [],
            "budget": None,
        },
    ),
    "slots": (("arithmetic", "slots"), 10**9),
    "a key of many lines": (("a\n" * 500,), 1),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_receipt_is_refused_in_one_line(receipt, name):
    path, value = HOSTILE[name]
    document = receipt.to_json()
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(UserError) as refusal:
        read_receipt(text_of(document))
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 400


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"format": "specdec-receipt/1", "format": "specdec-receipt/1"}',
        b"0" * (MOST_BYTES + 1),
    ],
    ids=["nothing", "list", "deep", "bytes", "twice", "large"],
)
def test_what_is_no_receipt_is_refused(data):
    with pytest.raises(UserError):
        read_receipt(data)


@pytest.mark.parametrize("part", ["model", "arithmetic", "seed", "limits", "constraint"])
def test_a_part_that_is_missing_is_named(receipt, part):
    document = receipt.to_json()
    del document[part]
    with pytest.raises(UserError, match=part):
        read_receipt(text_of(document))


def test_what_has_no_receipt_is_refused_when_one_is_made():
    seq = Sequence([1], constraint=Recite([1, 2]))
    with pytest.raises(UserError, match="recited"):
        receipt_of(IDENTITY, seq, Ended([2], "length"))
    with pytest.raises(UserError, match="empty"):
        receipt_of(IDENTITY, Sequence([1]), Ended([], "length"))
    with pytest.raises(UserError, match="no receipt: stop"):
        receipt_of(IDENTITY, Sequence([1]), Ended([2], "length", ["x" * 2000]))


@pytest.mark.parametrize("token", [-1, 2**31, 2**63])
def test_a_prediction_of_no_ids_does_not_reach_the_engine(token):
    with pytest.raises(UserError, match="token id"):
        PredictedText([5, token])


def test_the_fingerprint_names_weights_and_arithmetic():
    other = IDENTITY.model.model_copy(update={"weights": {"model.safetensors": "1" * 64}})
    wider = IDENTITY.arithmetic.model_copy(update={"width": 16})
    made = {
        type(IDENTITY)(model, arithmetic).fingerprint
        for model in (IDENTITY.model, other)
        for arithmetic in (IDENTITY.arithmetic, wider)
    }
    assert len(made) == 4 and all(name.startswith(f"specdec-{VERSION}-") for name in made)


def test_digests_are_made_once_and_anew_for_a_changed_file(tmp_path):
    folder, kept = tmp_path / "model", tmp_path / "kept"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"one")
    first = weight_digests(folder, kept)
    (file,) = kept.iterdir()
    document = json.loads(file.read_text())
    document["model.safetensors"][1] = "kept"
    file.write_text(json.dumps(document))
    assert weight_digests(folder, kept) == {**first, "model.safetensors": "kept"}
    (folder / "model.safetensors").write_bytes(b"two")
    assert weight_digests(folder, kept)["model.safetensors"] not in ("kept", first)
    beside, link = folder / "theirs", file.with_suffix(f".{os.getpid()}")
    beside.write_text("theirs")
    link.symlink_to(beside)  # no name that another process, or user, may have chosen
    file.write_text("cut o")
    assert set(weight_digests(folder, kept)) == {"config.json", "model.safetensors"}
    assert beside.read_text() == "theirs" and link.is_symlink() and file.read_text() != "cut o"
