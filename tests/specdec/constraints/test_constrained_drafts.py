"""Constrained text of a tiny model: neither drafter, prediction, loop nor batch changes a token."""

from __future__ import annotations

from functools import cache

import pytest

from drafters import registry
from specdec.assembly.engine import make_engine
from specdec.assembly.model import load_model
from specdec.constraints.constraint import TextConstraint, TextRules
from specdec.constraints.grammar import composed
from specdec.core.config import ModelConfig
from specdec.core.prediction import PredictedText, Prediction
from specdec.core.types import Sampling, Sequence
from tests.support.constrained import (
    AMBIGUOUS,
    check_predictions,
    mini_tokenizer,
    mini_vocabulary,
    texts,
)

pytestmark = pytest.mark.usefixtures("cheap_programs")

COMPOSED = composed(AMBIGUOUS, {})


@cache
def engine_of(model: str, drafter: str, loop: str, slots: int):
    config = ModelConfig(model, slots=slots, max_len=256)
    draft = model if drafter == "model" else None
    asked = registry.config_type()(drafter=drafter, k=4, loop=loop, draft_model=draft)
    speculation = registry.resolved(asked, config)
    return make_engine(load_model(config, speculation), speculation)


def alone(model: str):
    """Plain decoding of one request at a time."""
    return engine_of(model, "none", "host", 1)


@cache
def plain_of(model: str) -> list[list[int]]:
    return texts(alone(model))


@pytest.mark.parametrize(("drafter", "loop"), [("ngram", "host"), ("model", "device")])
def test_neither_drafter_nor_prediction_changes_a_token_of_constrained_text(worded, drafter, loop):
    """And a good prediction saves cycles. The model drafts for itself: whole drafts are accepted,
    and masks cut them."""
    engine, plain = engine_of(str(worded), drafter, loop, 4), plain_of(str(worded))
    assert texts(engine) == plain
    check_predictions(engine, plain)


def ambiguous_text(engine, guesses: list[int] | None) -> tuple[list[int], str | None, list[int]]:
    """The ids and finish reason of the constrained sequence, and the ids of its neighbour without a
    grammar."""
    tokenizer = mini_tokenizer()
    prompt = tokenizer.encode("a")
    constraint = TextConstraint(TextRules(grammar=COMPOSED), mini_vocabulary())
    # a text that goes on until the grammar ends it
    never_ends = Sampling(logit_bias=tuple((i, -100.0) for i in tokenizer.stop_ids))
    seq = Sequence(list(prompt), never_ends, max_tokens=100, constraint=constraint)
    if guesses is not None:
        seq.prediction = Prediction(PredictedText(guesses), seq.prompt_len)
    beside = Sequence(list(prompt), max_tokens=30)
    engine.run_to_end([seq, beside])
    return seq.tokens[len(prompt) :], seq.finish, beside.tokens[len(prompt) :]


@pytest.mark.parametrize(("drafter", "loop"), [("ngram", "host"), ("model", "device")])
def test_an_ambiguous_grammar_ends_at_the_same_token_whatever_was_drafted(worded, drafter, loop):
    """By a limit that counts, not by a clock; what was written by then is kept."""
    ids, finish, beside = ambiguous_text(alone(str(worded)), None)
    assert finish == "grammar_limit" and 10 < len(ids) < 90
    engine = engine_of(str(worded), drafter, loop, 4)
    before = engine.acceptance.accepted
    for guesses in (None, [*ids, *ids], [*ids[: len(ids) // 2], *ids]):
        assert ambiguous_text(engine, guesses) == (ids, finish, beside)
    assert engine.acceptance.accepted > before
