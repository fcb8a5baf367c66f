"""Replies count speculation by vLLM's names beside ours, as clients such as AIPerf read them."""

from __future__ import annotations

import pytest

from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import DraftSetup, Engine
from specdec.core.stats import Acceptance, vllm_fields
from specdec.core.types import NO_GUESS
from tests.support.fakes import Noise
from tests.support.serving import TOKENIZER, ServedTarget, served

K = 3


class Halting(Noise):
    """Guesses in every second cycle."""

    def propose(self, seqs, k):
        made = super().propose(seqs, k)
        for b, seq in enumerate(seqs):
            if len(seq.tokens) % 2:
                made.tokens[b] = NO_GUESS
        return made


@pytest.fixture(scope="module")
def server():
    target, drafter = ServedTarget(slots=2, chunk=4), Halting(30)
    cycle = host_cycle(target, drafter, K)
    engine = Engine(target, drafter, cycle, drafting=DraftSetup("noise", (), K))
    with served(engine, "fake", tokenizer=TOKENIZER) as it:
        yield it


@pytest.mark.parametrize("n", [1, 2])
def test_a_reply_has_vllms_fields(server, n):
    reply = server.post("completions", prompt="abcabc", max_tokens=40, n=n, seed=1).json()
    counts = reply["metrics"]["speculative_decoding"]
    histogram = counts["acceptance_histogram"]
    assert len(histogram) == K + 1 == counts["num_spec_tokens"] + 1
    assert all(type(count) is int for count in histogram)
    assert 0 < counts["num_spec_steps"] == sum(histogram) < counts["verify_passes"]
    assert counts["num_draft_tokens"] == counts["draft_tokens"] == K * counts["num_spec_steps"]
    accepted = counts["num_accepted_draft_tokens"]
    assert accepted == counts["accepted_tokens"] == sum(i * n for i, n in enumerate(histogram))
    assert counts["mean_acceptance_length"] == 1 + accepted / counts["num_spec_steps"]
    assert counts["draft_acceptance_rate"] == accepted / counts["num_draft_tokens"]


def test_a_stream_has_them_beside_its_usage(server):
    stream = server.openai.completions.create(
        model="fake",
        prompt="abc",
        max_tokens=9,
        stream=True,
        stream_options={"include_usage": True},
    )
    *_, last = stream
    counts = last.model_extra["metrics"]["speculative_decoding"]
    assert sum(counts["acceptance_histogram"]) == counts["num_spec_steps"] > 0


def test_without_a_guess_the_lengths_are_those_of_plain_decoding():
    counts = Acceptance()
    for _ in range(5):
        counts.add([], 0, 1, 8)
    assert vllm_fields(counts.histogram(K), counts.drafted) == {
        "mean_acceptance_length": 1.0,
        "draft_acceptance_rate": 0.0,
        "acceptance_histogram": [0, 0, 0, 0],
        "num_spec_steps": 0,
        "num_accepted_draft_tokens": 0,
        "num_draft_tokens": 0,
        "num_spec_tokens": 3,
    }


def test_plain_decoding_reports_no_steps():
    target = ServedTarget(slots=1, chunk=4)
    engine = Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 0))
    with served(engine, "fake", tokenizer=TOKENIZER) as server:
        reply = server.post("completions", prompt="abc", max_tokens=4).json()
    counts = reply["metrics"]["speculative_decoding"]
    assert counts["acceptance_histogram"] == [0] and counts["num_spec_steps"] == 0
