"""Training a block drafter: its inputs are those of drafting, it learns, a stopped run goes on, and
what is exported is what was trained."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from drafters.dflash.files import load_head, save_dspark
from drafters.frequency import draft_vocabulary
from specdec.core.errors import UserError
from tests.support.block_oracle import BlockOracle
from tests.support.eagle3_worker import STOPS, _teach, answers, made_up, target
from tests.support.tiny import VOCAB
from tests.support.tiny_blocks import SHAPE, random_block, spec_of
from training.heads import Origin, head_of
from training.packing import PackedRows, pack
from training.recipe import Rates, Recipe, block_for, read_block_recipe
from training.teacher import TeacherOutput
from training.trainer import Trainer
from training.vocabulary import count_generated

pytestmark = pytest.mark.usefixtures("cheap_programs")

RECIPE = Recipe(
    seed=3,
    steps=24,
    batch=4,
    length=32,
    unroll=3,
    decay=0.78,
    heldout_share=0.2,
    live_prompts=2,
    evaluate_every=100,
    save_every=12,
    head=SHAPE,
    rates=Rates(learning_rate=3e-3, warmup_steps=4, clip=1.0),
    loss="tv",
)


def test_a_target_with_a_head_of_its_own_lends_that_one():
    """Not its embedding, by which serving makes no logits."""
    arch = replace(target()[1], own_head=True)
    spec = block_for(arch, replace(SHAPE, draft_vocab=0), STOPS)
    table = np.random.default_rng(5).standard_normal((VOCAB, arch.hidden)).astype(np.float32)
    blank = np.ones(arch.hidden, np.float32)
    start = head_of(spec).start(Origin(table, blank), np.arange(VOCAB))
    assert np.array_equal(start["lm_head"], table)


@pytest.mark.parametrize(
    ("words", "anchor_predicts"),
    [(200, False), (0, False), (0, True)],
    ids=["pruned", "whole", "anchor"],
)
def test_each_position_is_trained_as_it_is_drafted_from(words, anchor_predicts):
    """Two documents in a row: the formulas' logits, with the true tokens before each draft."""
    spec = spec_of(replace(SHAPE, draft_vocab=words, anchor_predicts=anchor_predicts))
    assert spec.drafts == 3 + anchor_predicts
    head, random = random_block(spec), np.random.default_rng(4)
    trainee, width = head_of(spec), spec.body.hidden
    tokens = random.integers(3, VOCAB, (1, 31)).astype(np.int32)
    documents = np.array([[0] * 19 + [1] * 12], np.int32)
    rows = PackedRows(tokens, documents, tokens > 0, tokens < 0)
    features = random.standard_normal((1, 31, 3 * width)).astype(np.float32)
    table = random.standard_normal((VOCAB, width)).astype(np.float32)
    lesson = TeacherOutput(jnp.asarray(features), None, None, None)

    @jax.jit
    def run(weights):
        before, found = trainee.begin(weights, lesson), []
        for n in range(spec.drafts):
            fed = jnp.roll(jnp.asarray(tokens), -n - 1, 1)
            before, logits = trainee.step(weights, before, jnp.asarray(table), fed, rows, None)
            found.append(logits)
        return jnp.stack(found)

    found = np.asarray(run({n: jnp.asarray(w) for n, w in head.weights.items()}))
    oracle = BlockOracle(head, table, table)
    for first, place in ((0, 0), (0, 14), (19, 3)):
        anchor = first + place + 1
        hidden = oracle.hidden(torch.tensor(features[0, first:anchor]), int(tokens[0, anchor]))
        logits = oracle.logits(hidden)
        for n in range(spec.drafts):
            exact, _ = oracle.scores(hidden, logits, n, int(tokens[0, anchor + n]))
            assert np.abs(found[n, 0, anchor - 1] - exact.numpy()).max() < 1e-4


def trainer(run: Path) -> Trainer:
    """On a teacher with distributions that follow from the features."""
    params, arch = target()
    spec, rows = spec_of(), pack(answers(60), RECIPE.length)
    ids = draft_vocabulary(count_generated(rows, VOCAB), SHAPE.draft_vocab, STOPS)
    teacher = made_up(partial(_teach, arch, spec.taps, jnp.asarray(ids)))
    run.mkdir(parents=True, exist_ok=True)
    kept = pack(answers(12, 1), 32)
    return Trainer(RECIPE, spec, run, params, teacher, rows, kept, ids)


def test_it_learns_and_goes_on(tmp_path):
    rows: list[dict] = []
    first = trainer(tmp_path)
    first.evaluate = dict  # measured elsewhere
    first.train(12, rows.append)
    second = trainer(tmp_path)
    second.evaluate = dict
    assert int(second.state.step) == 12
    second.train(24, rows.append)
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert losses[-1] < 0.95 * losses[0]


def test_what_is_exported_is_what_was_trained(tmp_path):
    for words in (200, 0):
        head = random_block(spec_of(replace(SHAPE, draft_vocab=words)))
        save_dspark(head, tmp_path, STOPS, "google/gemma", "float32")
        found = load_head(tmp_path, target()[1])
        assert found.spec == head.spec
        assert (found.target_ids is None) == (head.target_ids is None) == (words == 0)
        assert all(np.array_equal(found.weights[n], head.weights[n]) for n in head.weights)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("unroll = 5", "unroll = 4", "must be slots - 1"),
        ("slots = 6", "slots = 6\nanchor_predicts = true", "must be slots"),
        ("slots = 6", "slots = 6\nfresh = 1", "fresh"),
        ("window = 128", "window = 0", "window"),
    ],
)
def test_impossible_recipes_are_refused(tmp_path, old, new, said):
    text = Path("configs/dspark-mini-cpu.toml").read_text()
    (tmp_path / "recipe.toml").write_text(text.replace(old, new))
    with pytest.raises(UserError, match=said):
        read_block_recipe(tmp_path / "recipe.toml")
