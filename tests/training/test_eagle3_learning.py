"""An EAGLE-3 head learns from the right lesson, and from no other one."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from tests.support.eagle3_worker import RECIPE, made_up, trainer
from training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("cheap_programs")


def shuffled(teach):
    """Negative control: `made_up` with the features of other positions."""

    def lesson(params, rows):
        right = made_up(teach)(params, rows)
        return right._replace(features=jnp.roll(right.features, 7, 1))

    return lesson


def one_early(teach):
    """Negative control: `made_up` with the distributions of the next position."""

    def lesson(params, rows):
        right = made_up(teach)(params, rows)
        early = jax.tree.map(lambda part: jnp.roll(part, -1, 1), right)
        return early._replace(features=right.features)

    return lesson


def another_target(teach):
    """Negative control: `made_up` with another's answers."""

    def lesson(params, rows):
        right = made_up(teach)(params, rows)
        logits = jnp.roll(right.logits, 5, -1)
        return right._replace(logits=logits, best=teach.args[-1][logits.argmax(-1)])

    return lesson


LEARNING = replace(
    RECIPE,
    steps=200,
    evaluate_every=200,
    save_every=200,
    unroll=1,
    rates=replace(RECIPE.rates, learning_rate=6e-3, clip=10.0),
)


def test_learning_needs_the_right_lesson(tmp_path, monkeypatch) -> None:
    """By held-out divergence after training with each teacher, as `made_up` judges it."""
    judging, found = trainer(tmp_path / "judge", made_up, LEARNING), {}
    for wrap in (made_up, shuffled, one_early, another_target):
        done = trainer(tmp_path / wrap.__name__, wrap, LEARNING)
        with monkeypatch.context() as patch:  # its own teacher need not judge it
            patch.setattr(Trainer, "evaluate", lambda self: {})
            done.train(LEARNING.steps)
        judging.state = done.state
        found[wrap] = judging.evaluate()["divergence"][0]
    right = found.pop(made_up)
    assert all(right < 0.7 * other for other in found.values()), (right, found)
