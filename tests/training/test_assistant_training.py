"""Training an assistant: its inputs are those of drafting, a stopped run goes on with the same
bits, and what is exported is read by transformers' own class."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafters.assistant.files import file_name, load_assistant, save_assistant
from specdec.core.errors import UserError
from targets import mini
from targets.checkpoint import Checkpoint
from targets.jax.params import load_params
from targets.model_folder import read_arch
from targets.tokenizer import load_tokenizer
from tests.support.assistants import TOLERANCE, a_text, assistant_for, chain, read_by_transformers
from tests.support.cheap import beside
from tests.support.eagle3_worker import answers, target
from tests.training.assistant_worker import IDS, OFTEN, SHAPE, SMALL, STEPS, taught, trainer
from training.heads import head_of, origin_of
from training.packing import PackedRows
from training.real_acceptance import Live, prompts_of
from training.recipe import (
    AssistantShape,
    assistant_for as shaped,
    read_assistant_recipe,
    read_recipe,
)
from training.teacher import load_teacher, teach
from training.trained import trained_assistant, trained_head
from training.trainer import Trainer, initial_state
from training.unroll import judge, measures

pytestmark = pytest.mark.usefixtures("cheap_programs")

TEXT = (
    "def mean(values):\n    return sum(values) / len(values)\n\n\nclass Stack:\n    def __init__("
)


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


@pytest.mark.slow
def test_a_run_that_is_killed_five_times_ends_as_the_unbroken_one(tmp_path, monkeypatch):
    """Before the first checkpoint, just after one, and between; each time by SIGKILL."""
    monkeypatch.setattr(Trainer, "evaluate", lambda self: {})
    whole = trainer(tmp_path / "whole", OFTEN)
    whole.train(STEPS)
    for last in (3, 5, 11, 12, 19):
        worker = beside("-m", "tests.training.assistant_worker", str(tmp_path / "parts"), str(last))
        _, said = worker.communicate()
        assert worker.returncode == -signal.SIGKILL, said.decode()[-2000:]
    parts = trainer(tmp_path / "parts", OFTEN)
    assert int(parts.state.step) == 16
    parts.train(STEPS)
    both = jax.tree.leaves(whole.state), jax.tree.leaves(parts.state)
    assert all(np.array_equal(ours, other) for ours, other in zip(*both, strict=True))


def test_an_assistant_of_the_targets_width_starts_as_its_end():
    """Its divergence is then already below that of a uniform distribution."""
    params, arch = load_teacher(mini.path("mini"))
    recipe = read_assistant_recipe(Path("assistant-mini-cpu.toml"))
    spec = shaped(arch, recipe.head)
    stored, ids = Checkpoint(mini.path("mini"), arch), np.arange(arch.vocab)
    weights = initial_state(spec, recipe, origin_of(params), ids).weights
    for i, number in enumerate((8, 9, 10, 11)):
        assert spec.arch.layers[i].sliding == arch.layers[number].sliding
        for name in ("self_attn.q_proj", "mlp.down_proj", "layer_scalar"):
            ours, own = weights[f"layers.{i}.{name}"], stored.read(f"layers.{number}.{name}").values
            assert np.array_equal(ours, own), (i, name)
    tokens = np.array([load_tokenizer(mini.path("mini"), arch.vocab).encode(TEXT)], np.int32)
    rows = PackedRows(tokens, 0 * tokens, tokens >= 0, tokens < 0)

    @jax.jit
    def judged(params, weights, rows):
        lesson = teach(params, arch, (), jnp.asarray(ids), (), rows, head_of(spec).lenders)
        return judge(weights, spec, params.top["embed_tokens"], jnp.asarray(ids), rows, lesson, 2)

    divergence = measures(judged(params, weights, rows))["divergence"]
    assert (divergence < np.log(arch.vocab)).all()


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
    blank = initial_state(spec, SMALL, origin_of(params), IDS).weights
    found = live(blank)
    assert set(found) == {"real_tau_t0", "real_tau_t1"} and live(blank) == found


def test_a_recipe_is_of_one_kind():
    """A recipe of the other command is refused with the keys that don't fit."""
    ours, other = Path("assistant-mini-cpu.toml"), Path("eagle3-mini-cpu.toml")
    assert read_assistant_recipe(ours).head == AssistantShape(hidden=256, ffw=960, heads=4)
    with pytest.raises(UserError, match=r"head\.hidden is missing.*compare with"):
        read_assistant_recipe(other)
    with pytest.raises(UserError, match=r"head\.kv_heads is missing"):
        read_recipe(ours)
    with pytest.raises(UserError, match="which must divide it"):
        shaped(target()[1], replace(SHAPE, heads=3))
