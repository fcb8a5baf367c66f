"""Cycle reports of both loops: the same guesses, and the drafters that made them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drafters import registry
from specdec.assembly.engine import make_engine
from specdec.assembly.model import load_model
from specdec.core.config import ModelConfig
from specdec.core.types import Sequence

pytestmark = pytest.mark.usefixtures("cheap_programs")

PROMPT = "def add_one(items):\n    return [item + 1 for item in items]\n\ndef add_two(items):\n"


def test_both_loops_report_the_same_guesses_and_auto_whose_they_are(worded):
    config = ModelConfig(str(worded), max_len=256)
    auto = registry.resolved(registry.config_type()(k=4, loop="host"), config)
    model = load_model(config, auto)
    lookup, reports = replace(auto, drafter="ngram"), {}
    ways = {"host": lookup, "device": replace(lookup, loop="device")}
    ways |= {"auto": auto, "auto, device": replace(auto, loop="device")}
    for way, speculation in ways.items():
        engine = make_engine(model, speculation)
        seq = Sequence(model.tokenizer.encode(PROMPT), max_tokens=40, reported=True)
        told_ = [event.report for event in engine.run([seq]) if event.report is not None]
        reports[way] = [(r.draft, r.guessers, r.accepted) for r in told_]
        assert len(told_) == seq.acceptance.cycles and all(r.seconds > 0 for r in told_)
        assert sum(r.accepted for r in told_) == seq.acceptance.accepted > 0
    assert reports["host"] == reports["device"]
    for way, choices in {"auto": {"suffix", "ngram"}, "auto, device": {"suffix"}}.items():
        said_by = {name for _, guessers, _ in reports[way] for name in guessers}
        assert said_by and said_by <= choices
        assert all(len(draft) == len(guessers) for draft, guessers, _ in reports[way])
