"""Where the engine's time goes, and what the comparison with plain decoding is made of."""

from __future__ import annotations

import time

import numpy as np
import pytest

from drafters.ngram.host import NgramDrafter
from specdec.assembly.engine import measure_plain
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.prediction import PredictedText, Prediction
from specdec.core.reporting import first_sources
from specdec.core.timing import PARTS, EngineTimes, PlainCosts
from specdec.core.types import NO_GUESS, Proposal, Round, Sequence, Step
from tests.support.fakes import FakeTarget
from tests.support.serving import ServedTarget, Server, serving


def engine_of(target: FakeTarget, k: int = 3) -> Engine:
    drafter = NgramDrafter()
    return Engine(target, drafter, host_cycle(target, drafter, k))


def test_the_parts_are_the_whole():
    engine, began = engine_of(FakeTarget(slots=2)), time.perf_counter()
    engine.run_to_end([Sequence([1, 2, 3], max_tokens=40) for _ in range(3)])
    whole = time.perf_counter() - began
    seconds = engine.times.seconds
    assert set(seconds) == set(PARTS) and seconds["device"] == 0
    assert all(seconds[part] > 0 for part in set(PARTS) - {"device"})
    assert sum(seconds.values()) <= whole


def test_a_device_loop_is_one_part():
    times = EngineTimes()
    rounds = [Round(None, Step(None), None) for _ in range(4)]
    assert times.dispatched(rounds, 2.0) == 0.5
    assert times.seconds["device"] == 2.0 and times.known == 2.0
    times.stepped(3.0, before=0.0)
    assert times.seconds["host"] == 1.0


def test_plain_costs_lie_between_one_row_and_all():
    costs = PlainCosts(one=1.0, all=3.0, slots=5)
    assert [costs.of(rows) for rows in (1, 3, 5)] == [1.0, 2.0, 3.0]
    assert PlainCosts(1.0, 1.0, slots=1).of(1) == 1.0
    times = EngineTimes(plain_costs=costs)
    times.emitted(tokens=12, rows=3)  # four steps of three rows
    assert times.plain == 8.0
    times.emitted(tokens=0, rows=0)
    assert times.plain == 8.0


def test_plain_decoding_is_measured_and_leaves_no_trace():
    target = ServedTarget(pause=0.001, slots=3)
    engine = engine_of(target)
    texts = []
    for measured in (False, True):
        if measured:
            measure_plain(engine)
        seq = Sequence([1, 2, 3], max_tokens=20)
        engine.run_to_end([seq])
        texts.append(seq.tokens)
        costs = engine.times.plain_costs
        assert (costs is not None) == measured and (engine.times.plain > 0) == measured
        engine.count_anew()
    assert texts[0] == texts[1] and engine.acceptance.cycles == 0
    assert costs is not None and costs.one >= 0.001 and costs.slots == 3


def test_guesses_are_counted_by_who_made_them():
    engine = engine_of(FakeTarget(slots=1))
    known = Sequence([1, 2, 3], max_tokens=20)
    engine.run_to_end([known])
    engine.count_anew()
    text = known.tokens[known.prompt_len :]
    told = Sequence([1, 2, 3], max_tokens=20, prediction=Prediction(PredictedText(text), 3))
    engine.run_to_end([told])
    assert told.tokens == known.tokens
    forced, both = engine.forced["prediction"], engine.acceptance
    assert forced.accepted_at.total() == told.acceptance.accepted > 10
    assert forced.drafted_at <= both.drafted_at
    assert engine.forced["constraint"].drafted_at.total() == 0
    assert sum(drafts.passes for drafts in engine.drafts.values()) == both.cycles
    assert sum(drafts.emitted for drafts in engine.drafts.values()) == both.emitted
    assert engine.drafts["prediction"].emitted > engine.drafts["prediction"].passes > 0


def test_the_first_guess_of_each_row_has_a_source():
    tokens = np.array([[5, 6], [7, 8], [NO_GUESS, NO_GUESS]], np.int32)
    assert first_sources(Proposal(tokens)) == ["drafter"] * 3
    names = "suffix", "assistant"
    by_row = Proposal(tokens, np.array([1, 0, 0], np.int32), names)
    assert first_sources(by_row) == ["assistant", "suffix", "suffix"]
    by_guess = Proposal(tokens, np.array([[0, 1], [1, 1], [1, 1]], np.int32), names)
    assert first_sources(by_guess) == ["suffix", "assistant", "assistant"]
    nothing = Proposal(tokens[:, :0], np.empty((3, 0), np.int32), names)
    assert first_sources(nothing) == ["drafter"] * 3


@pytest.fixture(scope="module")
def server():
    with serving(ServedTarget()) as server:
        yield server


def test_metrics_tell_all_of_it(server: Server):
    before = server.metrics()
    prediction = {"type": "content", "content": "abcabcabc"}
    for extra in ({}, {"prediction": prediction}):
        server.post("completions", prompt="abcabc", max_tokens=40, seed=7, **extra)
    after, engine = server.metrics(), server.runner.engine
    labels = 'engine="0",model_name="fake"'

    def grown(name):
        return after[name] - before.get(name, 0)

    passes = grown(f"specdec:verify_passes_total{{{labels}}}")
    assert 0 < passes <= grown(f"specdec:verified_tokens_total{{{labels}}}")
    for kind, of in (
        ("draft", engine.acceptance.drafted_at),
        ("accepted", engine.acceptance.accepted_at),
    ):
        for position in range(4):
            values = [
                after[
                    f'specdec:{kind}_tokens_total{{drafter="{who}",{labels},position="{position}"}}'
                ]
                for who in ("drafter", "prediction", "grammar")
            ]
            assert sum(values) == of[position] and min(values) >= 0
    assert grown(f"vllm:inter_token_latency_seconds_count{{{labels}}}") == passes
    parts = [after[f'specdec:engine_seconds_total{{{labels},part="{part}"}}'] for part in PARTS]
    assert all(value >= 0 for value in parts) and sum(parts) > 0
    assert after[f"specdec:slots{{{labels}}}"] == engine.target.slots
