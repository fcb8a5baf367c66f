"""Random cases of all features at once: each request's outcome equals that of plain decoding alone.

pytest -m campaign --seconds 600 --seed 7 tests/lossless/test_campaign.py
"""

from __future__ import annotations

from random import Random

import pytest

from tests.campaign import Counts, Failed, campaign, check_case
from tests.lossless import campaign_parts as parts
from tests.lossless.campaign_draw import draw_case

SMALL = {
    "target": {"backend": "cuda", "model": "31b", "slots": 2, "max_len": 32, "k": 4}
    | {"chunk": 8, "features": [], "device": "cpu", "dtype": "float32", "kv_dtype": "float32"},
    "runs": [
        {"drafter": "ngram", "k": 3, "loop": "host", "lengths": [1, 3]}
        | {
            "requests": [
                {"prompt": {"seed": i, "length": 5 + i, "period": 2}, "sampling": {"logprobs": 1}}
                | {"max_tokens": 4, "stop_ids": [], "at": i, "cancel": None}
                for i in range(3)
            ]
        }
    ],
}
"""A case that takes a second."""


@pytest.mark.campaign
def test_campaign(request, capsys):
    option = request.config.getoption
    if option("--case"):
        check_case(option("--case"), Counts())
        return
    backends = [option("--backend")] if option("--backend") else ["jax", "cuda"]
    for backend in backends:
        device = parts.cuda_device() if backend == "cuda" else "cpu"
        seconds = option("--seconds") / len(backends)
        counts = campaign(seconds, option("--seed"), backend, device)
        with capsys.disabled():
            print(f"\n{backend}: no difference: {counts}")
        assert counts.cases


def test_a_case_counts_what_it_compared():
    counts = Counts()
    check_case(SMALL, counts)
    assert (counts.cases, counts.runs, counts.requests, counts.tokens) == (1, 1, 3, 12)


def test_a_difference_is_told_as_a_case(monkeypatch):
    """For a target with other tokens in larger batches, the failure contains the case."""

    class Swayed(parts.Bench):
        def engine(self, run):
            engine = super().engine(run)
            honest = engine.target.verify

            def verify(seqs, draft):
                step = honest(seqs, draft)
                step.chosen[:, 0] += len(seqs) > 1
                return step

            monkeypatch.setattr(engine.target, "verify", verify)
            return engine

    monkeypatch.setattr(parts, "Bench", Swayed)
    with pytest.raises(Failed, match="alone and plainly") as failed:
        check_case(SMALL, Counts())
    assert failed.value.case == SMALL and "--case" in str(failed.value)


@pytest.mark.parametrize("backend", ["jax", "cuda"])
def test_a_seed_draws_the_same_cases_again(backend):
    cases = [draw_case(Random("7"), backend, "cpu") for _ in range(2)]
    assert cases[0] == cases[1] != draw_case(Random("8"), backend, "cpu")
