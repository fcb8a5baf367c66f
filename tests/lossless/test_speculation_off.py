"""A request that is not speculated on: no guess for it, and the same text beside those that are."""

from __future__ import annotations

import pytest

from drafters import registry
from specdec.assembly.engine import make_engine
from specdec.assembly.model import Model, load_model
from specdec.core.config import Loop, ModelConfig, SpeculationConfig
from specdec.core.types import Sampling, Sequence, Speculative

pytestmark = pytest.mark.usefixtures("cheap_programs")

CODE = "def add_one(items):\n    return [item + 1 for item in items]\n\ndef add_two(items):\n"
REQUESTS = ((CODE, 0.0, 40), ("class A:\n    def f(self):\n", 1.0, 20), ("import os\n", 0.0, 40))
"""Prompt, temperature, tokens."""


def loaded(path: str, drafter: str, loop: Loop) -> tuple[Model, SpeculationConfig]:
    config = ModelConfig(path, max_len=256)
    draft = path if drafter == "model" else None
    asked = registry.config_type()(drafter=drafter, k=4, loop=loop, draft_model=draft)
    speculation = registry.resolved(asked, config)
    return load_model(config, speculation), speculation


def decoded(model: Model, speculation: SpeculationConfig, on: tuple[bool, ...]) -> list[Sequence]:
    """The requests, of which the first is under way when the others come."""
    engine = make_engine(model, speculation)
    seqs = [
        Sequence(
            model.tokenizer.encode(prompt),
            Sampling(temperature=temperature, seed=3),
            max_tokens=count,
            speculative=None if speculates else Speculative(k=0),
        )
        for (prompt, temperature, count), speculates in zip(REQUESTS, on, strict=True)
    ]
    engine.submit(seqs[0])
    for _ in range(4):
        engine.step()
    engine.run_to_end(seqs[1:])
    return seqs


@pytest.mark.parametrize(("drafter", "loop"), [("ngram", "device"), ("model", "host")])
def test_texts_are_equal_and_nothing_is_guessed(worded, drafter, loop):
    model, speculation = loaded(str(worded), drafter, loop)
    plain = [seq.tokens for seq in decoded(model, speculation, (False, False, False))]
    for on in ((False, True, True), (True, False, False)):
        seqs = decoded(model, speculation, on)
        assert [seq.tokens for seq in seqs] == plain
        for seq, speculates in zip(seqs, on, strict=True):
            assert (seq.acceptance.drafted > 0) == speculates
            assert speculates or seq.acceptance.tau == 1
