"""Training an assistant: its inputs are those of drafting, a stopped run goes on with the same
bits, and what is exported is read by transformers' own class."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafters.assistant.files import file_name, load_assistant, save_assistant
from specdec.core.errors import UserError
from targets.arch import read_arch
from targets.checkpoint import Checkpoint
from targets.jax.params import load_params
from tests.assistants import TOLERANCE, a_text, assistant_for, chain, read_by_transformers
from tests.eagle3_worker import RECIPE, answers, target
from tests.tiny import VOCAB
from training.heads import head_of
from training.packing import PackedRows, pack
from training.real_acceptance import Live, prompts_of
from training.recipe import (
    AssistantShape,
    assistant_for as shaped,
    read_assistant_recipe,
    read_recipe,
)
from training.teacher import teach
from training.trained import trained_assistant, trained_head
from training.trainer import Trainer, contract_of, initial_state, sign

pytestmark = pytest.mark.usefixtures("cheap_programs")

SHAPE = AssistantShape(hidden=32, ffw=48, heads=4, sliding=1)
SMALL = replace(RECIPE, head=SHAPE, unroll=1, evaluate_every=100, save_every=100)
IDS = np.arange(VOCAB)


def taught(head, arch):
    def lesson(params, rows):
        return teach(params, arch, head.layers, jnp.asarray(IDS), (), rows, head.lenders)

    return lesson


@pytest.mark.parametrize("variant", ["31b", pytest.param("e2b", marks=pytest.mark.slow)])
def test_each_position_is_trained_as_it_is_drafted_from(tiny, variant):
    """Two documents in a row, and two steps: transformers' logits after each text's beginning."""
    path = tiny[variant]
    arch, assistant = read_arch(path), assistant_for(path, variant)
    params = load_params(Checkpoint(path, arch), arch, jnp.float32)
    spec = replace(assistant.spec, clusters=None)  # in training every word is scored
    head = head_of(spec)
    texts = a_text(19, 4), a_text(12, 5)
    tokens = np.array([[*texts[0], *texts[1], 0]], np.int32)
    documents = np.array([[0] * 19 + [1] * 12 + [-1]], np.int32)
    rows = PackedRows(tokens, documents, tokens > 0, tokens < 0)
    weights = {n: jnp.asarray(v, jnp.float32) for n, v in assistant.weights.items()}

    def run(params, rows):
        lesson, logits = taught(head, arch)(params, rows), []
        before, table = head.begin(weights, lesson), params.top["embed_tokens"]
        for n in range(2):
            fed = jnp.roll(rows.tokens, -n - 1, 1)
            before, guessed = head.step(weights, before, table, fed, rows, lesson.lent)
            logits.append(guessed)
        return jnp.stack(logits)

    found = np.asarray(jax.jit(run)(params, rows))
    for text, first in zip(texts, (0, 19), strict=True):
        for place in (0, 5, len(text) - 4):
            following = text[place + 2 : place + 4]
            said = chain(variant, text[: place + 2], 2, choose=lambda _, j, f=following: f[j])
            for n in range(2):
                ours, known = found[n, 0, first + place], np.isfinite(said.logits[n])
                assert np.abs(ours[known] - said.logits[n][known]).max() <= TOLERANCE


def trainer(run, recipe=SMALL):
    params, arch = target()
    spec = shaped(arch, recipe.head)
    run.mkdir(parents=True, exist_ok=True)
    rows, kept = pack(answers(30), recipe.length), pack(answers(6, 1), recipe.length)
    sign(run, contract_of(recipe, spec, {"target": "right"}), IDS)
    return Trainer(recipe, spec, run, params, taught(head_of(spec), arch), rows, kept, IDS)


def test_a_stopped_run_goes_on_with_the_same_bits_and_is_exported(tmp_path, monkeypatch):
    params, arch = target()
    monkeypatch.setattr("training.trained.target_hash", lambda path: path.name)
    monkeypatch.setattr("training.trained.read_arch", lambda path: arch)
    monkeypatch.setattr(Trainer, "evaluate", lambda self: {})
    whole, losses = trainer(tmp_path / "whole"), []
    whole.train(40, lambda row: losses.append(row.get("loss")))
    trainer(tmp_path / "parts").train(3)
    again = trainer(tmp_path / "parts")
    again.train(40)
    for name, value in whole.state.weights.items():
        assert (np.asarray(value) == np.asarray(again.state.weights[name])).all(), name
    said = [loss for loss in losses if loss is not None]
    assert said[-1] < 0.9 * said[0]
    assistant, step = trained_assistant(tmp_path / "parts", tmp_path / "right")
    assert step == 40
    save_assistant(assistant, tmp_path / "out", "float32")
    loaded = load_assistant(tmp_path / "out", arch)
    assert loaded.spec == assistant.spec
    theirs = dict(read_by_transformers(tmp_path / "out").named_parameters())
    for name, value in assistant.weights.items():
        stored = file_name(assistant.spec, name)
        found = theirs.get(stored)
        if found is not None:  # layer scalars are buffers
            assert (found.detach().numpy() == value).all(), name
    with pytest.raises(UserError, match="another model"):
        trained_assistant(tmp_path / "parts", tmp_path / "wrong")
    with pytest.raises(UserError, match="train-assistant`, not of train-eagle3"):
        trained_head(tmp_path / "parts", tmp_path / "right")


@pytest.mark.slow
def test_real_acceptance_is_measured_with_the_weights_at_hand():
    params, arch = target()
    spec = shaped(arch, SHAPE)
    live = Live(params, arch, spec, IDS, prompts_of(answers(12), 3, 4), 2, (), ())
    table, norm = (np.asarray(params.top[name]) for name in ("embed_tokens", "norm"))
    blank = initial_state(spec, SMALL, table, norm, IDS).weights
    found = live(blank)
    assert set(found) == {"real_tau_t0", "real_tau_t1"} and live(blank) == found


def test_a_recipe_is_of_one_kind():
    """Of the other command's it is said, by key, what does not fit."""
    ours, other = Path("assistant-mini-cpu.toml"), Path("eagle3-mini-cpu.toml")
    assert read_assistant_recipe(ours).head == AssistantShape(hidden=256, ffw=768, heads=8)
    with pytest.raises(UserError, match=r"head\.hidden is missing.*compare with"):
        read_assistant_recipe(other)
    with pytest.raises(UserError, match=r"head\.kv_heads is missing"):
        read_recipe(ours)
    with pytest.raises(UserError, match="which must divide it"):
        shaped(target()[1], replace(SHAPE, heads=3))
