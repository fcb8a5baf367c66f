"""An EAGLE-3 head learns what its target does, from what counts and nothing else, and a killed run
goes on as if it had not been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from drafters.eagle3 import jax as eagle3
from drafters.eagle3.files import load_head, save_flat
from drafters.eagle3.spec import default_layers
from specdec.errors import UserError
from targets import mini
from targets.arch import read_arch, released
from targets.jax.model import head, sequence_hidden
from tests.commands import refused
from tests.eagle3_oracle import SPEC, Oracle, random_head
from tests.eagle3_worker import RECIPE, SHAPE, STOPS, VOCAB, answers, target, trainer
from training.eagle3 import contract_of, initial_state, sign
from training.live import Live, prompts_of
from training.packing import PADDING, Rows, pack, rows_of_step
from training.recipe import read_recipe, spec_for
from training.teacher import Lesson, teach
from training.trained import trained_head
from training.unroll import judge, loss_of, masks, measures, walked_tau
from training.vocabulary import count_generated, coverage, draft_vocabulary

STEPS, DECAY = 3, 0.8
CONFIGS = Path(__file__).parent.parent / "configs"


def lesson_for(rows: Rows, ids: np.ndarray) -> Lesson:
    """Made-up features and distributions; at some positions the favourite is no draft id."""
    random, shape = np.random.default_rng(0), rows.tokens.shape
    features = random.standard_normal((*shape, SPEC.features)).astype(np.float32)
    whole = random.standard_normal((*shape, SPEC.vocab)).astype(np.float32) * 3
    return Lesson(
        jnp.asarray(features),
        jnp.asarray(whole[..., ids]),
        jax.nn.logsumexp(jnp.asarray(whole), -1),
        jnp.asarray(whole.argmax(-1).astype(np.int32)),
    )


def judged(head, rows: Rows, lesson: Lesson, table, weights=None):
    placed, ids = eagle3.place(head, jnp.float32)
    noise = jax.random.key(0)
    return judge(weights or placed, head.spec, jnp.asarray(table), ids, rows, lesson, STEPS, noise)


def small_rows(count: int = 4, length: int = 20) -> Rows:
    made = [a | {"input_ids": [i % SPEC.vocab for i in a["input_ids"]]} for a in answers(count)]
    return pack(made, length)


# --- what counts ------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 999), st.integers(1, 5))
def test_masks_are_their_definition(seed, steps) -> None:
    rows = pack(answers(5, seed), 24)
    for n, mask in enumerate(masks(rows, steps)):
        for r, i in np.ndindex(rows.tokens.shape):
            steps_to = range(i + 1, i + 2 + n)
            fits = steps_to[-1] < rows.tokens.shape[1] and rows.documents[r, i] != PADDING
            counts = fits and all(
                rows.generated[r, j] and rows.documents[r, j] == rows.documents[r, i]
                for j in steps_to
            )
            counts = counts and not rows.ends[r, steps_to[-1]]
            assert bool(mask[r, i]) == counts


def test_the_prompts_last_position_counts() -> None:
    answer = {"input_ids": [2, 5, 6, 7, 1], "gen_mask": [False, False, True, True, True]}
    mask = masks(pack([answer | {"finish": "stop"}], 8), 1)[0]
    assert np.flatnonzero(mask[0]).tolist() == [1, 2]  # 3 would be fed the stop id


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), min_size=6, max_size=40), st.data())
def test_vocabulary_has_the_commonest_and_all_stop_ids(counts, data) -> None:
    counts = np.array(counts)
    stops = data.draw(st.sets(st.integers(0, len(counts) - 1), max_size=3))
    size = data.draw(st.integers(max(1, len(stops)), len(counts)))
    ids = draft_vocabulary(counts, size, stops)
    assert len(ids) == size and (np.diff(ids) > 0).all() and stops <= set(ids.tolist())
    chosen, left = set(ids.tolist()) - stops, set(range(len(counts))) - set(ids.tolist())
    assert not chosen or not left or counts[list(chosen)].min() >= counts[list(left)].max()
    assert coverage(counts, np.arange(len(counts))) in (0.0, 1.0)


def test_every_row_is_seen_once_an_epoch() -> None:
    rows = pack(answers(30), 32)
    count = len(rows.tokens)
    seen = [rows_of_step(rows, 1, step, 1).tokens[0].tolist() for step in range(count)]
    assert sorted(seen) == sorted(rows.tokens.tolist())


# --- the teacher ------------------------------------------------------------------------------


def test_the_teacher_is_the_target_alone_with_each_document() -> None:
    params, arch = target()
    rows, ids = pack(answers(2), 64), np.arange(arch.vocab)
    lesson = teach(params, arch, (1, 3, 5), ids, (7,), rows)
    for r in range(len(rows.tokens)):
        for document in range(rows.documents[r].max() + 1):
            at = rows.documents[r] == document
            alone = rows.tokens[r][at][None]
            hidden = sequence_hidden(params, arch, alone, (1, 3, 5))
            expected = np.array(head(params, arch, hidden.last)[0])
            expected[:, 7] = -np.inf
            np.testing.assert_allclose(lesson.features[r][at], hidden.features[0], atol=1e-4)
            np.testing.assert_allclose(lesson.logits[r][at], expected, atol=1e-4)
            assert np.array_equal(lesson.best[r][at], expected.argmax(-1))
            total = np.log(np.exp(expected.astype(np.float64)).sum(-1))
            np.testing.assert_allclose(lesson.total[r][at], total, atol=1e-4)


# --- the loss ---------------------------------------------------------------------------------


def oracle_loss(oracle: Oracle, rows: Rows, lesson: Lesson, table, ids) -> torch.Tensor:
    """The loss, anchor by anchor, from the definition."""
    terms: list[list[torch.Tensor]] = [[] for _ in range(STEPS)]
    wanted = [np.asarray(mask) for mask in masks(rows, STEPS)]
    embeddings = torch.tensor(table)
    for r, i in zip(*np.nonzero(wanted[0]), strict=True):
        begin = int(np.flatnonzero(rows.documents[r] == rows.documents[r, i])[0])
        tokens = np.append(rows.tokens[r], np.zeros(STEPS, np.int32))[begin + 1 :]
        features = torch.tensor(np.asarray(lesson.features[r])[begin:])
        guessed = oracle.chain(embeddings[tokens], features, int(i) - begin, STEPS)
        for n in range(STEPS):
            at = (r, i + 1 + n)
            if wanted[n][r, i] and int(lesson.best[at]) in ids:
                share = torch.tensor(np.asarray(lesson.logits[at])).log_softmax(-1)
                log_q = guessed[n].log_softmax(-1)
                terms[n].append((share.exp() * (share - log_q)).sum())
    assert all(terms)
    return sum(DECAY**n * torch.stack(t).mean() for n, t in enumerate(terms))  # type: ignore[return-value]


def test_loss_and_gradients_equal_the_formulas() -> None:
    head, rows = random_head(fc_norm=True, norm_output=True), small_rows()
    lesson = lesson_for(rows, head.target_ids)
    table = np.random.default_rng(5).standard_normal((SPEC.vocab, SPEC.hidden)).astype(np.float32)

    def loss(weights):
        return loss_of(judged(head, rows, lesson, table, weights), DECAY)

    value, gradient = jax.jit(jax.value_and_grad(loss))(eagle3.place(head, jnp.float32)[0])
    oracle = Oracle(head, grad=True)
    expected = oracle_loss(oracle, rows, lesson, table, set(head.target_ids.tolist()))
    expected.backward()
    assert abs(float(value) - expected.item()) < 1e-5
    for name, weight in oracle.w.items():
        assert weight.grad is not None
        np.testing.assert_allclose(gradient[name], weight.grad.numpy(), atol=1e-5, err_msg=name)


def test_packed_documents_are_judged_as_if_alone() -> None:
    head, made = random_head(), answers(6)
    made = [a | {"input_ids": [i % SPEC.vocab for i in a["input_ids"]]} for a in made]
    packed = pack(made, 64)
    table = np.random.default_rng(5).standard_normal((SPEC.vocab, SPEC.hidden)).astype(np.float32)
    lesson = lesson_for(packed, head.target_ids)
    judge_rows = jax.jit(lambda rows, lesson: judged(head, rows, lesson, table))
    together = judge_rows(packed, lesson)
    number = 0
    for r in range(len(packed.tokens)):
        for document in range(packed.documents[r].max() + 1):
            at = np.flatnonzero(packed.documents[r] == document)
            own = jax.tree.map(lambda x, r=r, at=at: jnp.roll(x[r], -at[0], 0)[None], lesson)
            alone, size = judge_rows(pack([made[number]], 64), own), len(at)
            assert np.array_equal(alone.mask[:, 0, :size], together.mask[:, r, at])
            for field in ("divergence", "hit", "overlap"):
                mine = getattr(together, field)[:, r, at] * together.mask[:, r, at]
                theirs = (getattr(alone, field) * alone.mask)[:, 0, :size]
                np.testing.assert_allclose(mine, theirs, atol=1e-5)
            number += 1


def test_measures_of_a_perfect_draft() -> None:
    """A draft that is the target has overlap 1 and is always accepted, under any noise."""
    head, rows = random_head(), small_rows()
    ids = jnp.asarray(head.target_ids)
    guessed = jax.random.normal(jax.random.key(2), (*rows.tokens.shape, len(ids))) * 3
    from training.unroll import Judged, _compare

    total = jax.nn.logsumexp(guessed, -1)
    taught = Lesson(None, guessed, total, ids[guessed.argmax(-1)])
    fields = _compare(guessed, taught, ids, jax.random.key(0))
    mask = jnp.stack([m.astype(jnp.float32) for m in masks(rows, STEPS)])
    found = measures(Judged(mask, *(jnp.stack([field] * STEPS) for field in fields)))
    for name in ("accuracy", "overlap", "coupled", "known"):
        np.testing.assert_allclose(found[name], 1.0, atol=1e-5)
    for name in ("tau_t0", "tau_t1", "tau_t1_bound"):
        np.testing.assert_allclose(found[name], 1 + STEPS, atol=1e-4)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 999), st.integers(1, 4))
def test_simulated_tau_is_that_of_decoding_the_rows(seed, steps) -> None:
    rows = pack(answers(9, seed), 40)
    mask = np.stack([np.asarray(m) for m in masks(rows, steps)])
    hit = np.random.default_rng(seed).random(mask.shape) < 0.6
    cycles = emitted = 0
    for r in range(mask.shape[1]):
        i = 0
        while i < mask.shape[2]:
            if not mask[0, r, i]:
                i += 1
                continue
            count = 0
            while count < steps and mask[count, r, i] and hit[count, r, i]:
                count += 1
            if mask[-1, r, i]:
                cycles, emitted = cycles + 1, emitted + count + 1
            i += count + 1
    expected = emitted / cycles if cycles else 1.0
    assert np.isclose(walked_tau(jnp.float32(hit), jnp.float32(mask)), expected)


def test_coupled_choices_agree_as_often_as_the_theorem_says() -> None:
    """Between (1 - TV) / (1 + TV) and 1 - TV (arXiv 2408.07978), here over 20,000 draws."""
    from training.unroll import _compare

    draws = 20_000
    p, q = (jax.random.normal(jax.random.key(i), (9,)) * 1.5 for i in (0, 1))
    whole = jax.nn.logsumexp(p)
    taught = Lesson(None, p[None, None, 1:], whole[None, None], jnp.argmax(p)[None, None])
    taught = jax.tree.map(lambda x: jnp.broadcast_to(x, (1, draws, *x.shape[2:])), taught)
    guessed = jnp.broadcast_to(q[1:], (1, draws, 8))
    _, _, _, overlap, coupled = _compare(guessed, taught, jnp.arange(1, 9), jax.random.key(7))
    bound = float(overlap[0, 0])
    assert bound / (2 - bound) - 0.01 < float(coupled.mean()) < bound + 0.01


# --- the run ----------------------------------------------------------------------------------


def losses(run: Path, kind: str = "heldout") -> list[dict]:
    rows = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == kind]


def without_speed(run: Path) -> list[dict]:
    rows = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]


def test_a_killed_run_goes_on_bit_for_bit(tmp_path) -> None:
    """20 steps = 10, kill -9 at 20 before it is saved, 10 again."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    first = trainer(whole)
    first.train(20)
    command = [sys.executable, "-m", "tests.eagle3_worker", str(broken), "10"]
    died = subprocess.run(command, cwd=CONFIGS.parent, capture_output=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()[-2000:]
    second = trainer(broken)
    assert int(second.state.step) == 10
    second.train(20)
    for mine, theirs in zip(
        jax.tree.leaves(first.state), jax.tree.leaves(second.state), strict=True
    ):
        assert np.array_equal(mine, theirs)
    assert without_speed(whole) == without_speed(broken)


def made_up(teach):
    """A teacher whose next distribution follows from the last position's features alone."""
    ids = teach.args[-1]

    def lesson(params, rows):
        key = jax.random.fold_in(jax.random.key(0), rows.tokens.sum())
        features = jax.random.normal(key, (*rows.tokens.shape, 3 * params.top["norm"].shape[0]))
        meaning = jax.random.normal(jax.random.key(1), (4, SHAPE.draft_vocab)) * 3
        logits = jnp.roll(features[..., :4] @ meaning, 1, 1)
        total = jax.nn.logsumexp(logits, -1)
        return Lesson(features, logits, total, ids[logits.argmax(-1)])

    return lesson


def shuffled(teach):
    """Negative control: `made_up` with the features of other positions."""

    def lesson(params, rows):
        right = made_up(teach)(params, rows)
        return right._replace(features=jnp.roll(right.features, 7, 1))

    return lesson


def one_early(teach):
    """Negative control: `made_up` that tells what follows one token later."""

    def lesson(params, rows):
        features, *told = made_up(teach)(params, rows)
        return Lesson(features, *(jnp.roll(part, -1, 1) for part in told))

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


def learnt(run: Path, wrap) -> float:
    """Held-out divergence after training with one teacher, as `made_up` judges it."""
    done, judging = trainer(run, wrap, LEARNING), trainer(run / "judge", made_up, LEARNING)
    done.train(LEARNING.steps)
    judging.state = done.state
    return judging.evaluate()["divergence"][0]


def test_learning_needs_the_right_lesson(tmp_path) -> None:
    right = learnt(tmp_path / "right", made_up)
    for control in (shuffled, one_early, another_target):
        found = learnt(tmp_path / control.__name__, control)
        assert right < 0.7 * found, (control.__name__, right, found)


def test_devices_share_the_rows_of_a_batch(tmp_path) -> None:
    """Two devices, each with half of the rows, train as one does but for the order of sums."""
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    recipe = replace(RECIPE, evaluate_every=4, save_every=4)
    trainer(alone, recipe=recipe).train(4)
    script = (
        "import sys; from dataclasses import replace; from pathlib import Path; import jax; "
        "from tests.eagle3_worker import RECIPE, trainer; assert jax.device_count() == 2; "
        "recipe = replace(RECIPE, evaluate_every=4, save_every=4); "
        "trainer(Path(sys.argv[1]), recipe=recipe, devices=2).train(4)"
    )
    flags = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-c", script, str(shared)]
    ran = subprocess.run(command, cwd=CONFIGS.parent, env=flags, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr.decode()[-2000:]
    for one, two in zip(losses(alone), losses(shared), strict=True):
        for name, value in one.items():
            if name not in ("kind", "tokens_per_second"):
                assert np.allclose(value, two[name], rtol=1e-4, atol=1e-5), name
    with pytest.raises(UserError, match="devices that JAX sees"):
        trainer(tmp_path / "many", devices=99)


def test_real_acceptance_is_measured_with_the_weights_at_hand() -> None:
    """The engine decodes the same text with any head, and the same head is accepted as often."""
    params, arch = target()
    spec = spec_for(arch, replace(SHAPE, draft_vocab=VOCAB), STOPS)
    prompts = prompts_of(answers(12), 3, 4)
    assert len(prompts) == 3 and all(1 <= len(prompt) <= 4 for prompt in prompts)
    live = Live(params, arch, spec, np.arange(VOCAB), prompts, 2, (), ())
    table, norm = (np.asarray(params.top[name]) for name in ("embed_tokens", "norm"))
    blank = initial_state(spec, RECIPE, table, norm, np.arange(VOCAB)).weights
    found = live(blank)
    assert set(found) == {"real_tau_t0", "real_tau_t1"}
    assert all(1 <= tau <= 3 for tau in found.values())
    assert live(blank) == found


def test_an_exported_head_is_the_trained_one(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("training.trained.target_hash", lambda path: path.name)
    run, out = tmp_path / "run", tmp_path / "head"
    spec = spec_for(target()[1], SHAPE, STOPS)
    ids = draft_vocabulary(count_generated(pack(answers(60), 32), spec.vocab), 200, STOPS)
    sign(run, contract_of(RECIPE, spec, {"target": "right"}), ids)
    with pytest.raises(UserError, match="no checkpoint yet"):
        trained_head(run, tmp_path / "right")
    done = trainer(run, made_up, replace(RECIPE, evaluate_every=100))
    monkeypatch.setattr(type(done), "evaluate", lambda self: {})
    done.train(2)
    with pytest.raises(UserError, match="another model"):
        trained_head(run, tmp_path / "wrong")
    head, step, steps = trained_head(run, tmp_path / "right")
    assert (step, steps) == (2, RECIPE.unroll)
    save_flat(head, out, STOPS, "float32")
    found = load_head(out, target()[1])
    assert found.spec == spec and np.array_equal(found.target_ids, ids)
    assert found.weights.keys() == done.state.weights.keys()
    for name, value in done.state.weights.items():
        assert np.array_equal(found.weights[name], value)


# --- refusals ---------------------------------------------------------------------------------


def test_impossible_data_and_recipes_are_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="no answers"):
        pack([], 16)
    silent = {"input_ids": [2, 3, 4], "gen_mask": [False] * 3, "finish": "length"}
    with pytest.raises(UserError, match="no generated token"):
        pack([silent], 16)
    with pytest.raises(UserError, match="stop ids"):
        spec_for(target()[1], replace(SHAPE, draft_vocab=1), STOPS)
    with pytest.raises(UserError, match="layers 0 to 8"):
        spec_for(target()[1], replace(SHAPE, layers=(1, 3, 9)), STOPS)
    spec = spec_for(target()[1], SHAPE, STOPS)
    sign(tmp_path, contract_of(RECIPE, spec, {}), np.arange(3))
    sign(tmp_path, contract_of(RECIPE, spec, {}), np.arange(3))
    with pytest.raises(UserError, match="other recipe, data"):
        sign(tmp_path, contract_of(replace(RECIPE, seed=4), spec, {"x": 1}), np.arange(3))
    with pytest.raises(UserError, match="missing"):
        read_recipe(tmp_path / "none.toml")
    (tmp_path / "odd.toml").write_text("steps = 3\ncolour = 1\n")
    with pytest.raises(UserError, match="compare with"):
        read_recipe(tmp_path / "odd.toml")


@pytest.mark.parametrize("recipe", sorted(CONFIGS.glob("eagle3-*.toml")), ids=lambda p: p.stem)
def test_the_shipped_recipes_fit_their_targets(recipe) -> None:
    name = recipe.stem.removeprefix("eagle3-")
    arch = read_arch(mini.path("mini")) if name.startswith("mini") else released(f"gemma-4-{name}")
    spec = spec_for(arch, read_recipe(recipe).head, STOPS)
    assert spec.layers == default_layers(len(arch.layers))


def test_the_commands_refuse_in_one_line(tmp_path, capsys) -> None:
    recipe, nowhere = str(CONFIGS / "eagle3-mini-cpu.toml"), str(tmp_path / "nowhere")
    command = ["train-eagle3", recipe, "--run", str(tmp_path / "run"), "--data"]
    assert "specdec distil" in refused(capsys, *command, nowhere)
    assert "unquantised" in refused(capsys, *command, nowhere, "--int8")
    assert "no training run" in refused(capsys, "export-eagle3", nowhere, "--out", str(tmp_path))


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch) -> None:
    run = trainer(tmp_path, made_up, recipe=replace(RECIPE, save_every=1, evaluate_every=100))
    monkeypatch.setattr(type(run), "evaluate", lambda self: {})
    run.train(1)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(type(run.manager), "save", full)
        with pytest.raises(UserError, match="step 1 stands"):
            run.train(2)
    assert int(trainer(tmp_path).state.step) == 1
