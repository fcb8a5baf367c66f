"""A killed run goes on as if it had not been, several devices train as one does, what is exported
is what was trained, and a full disk costs no checkpoint."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from drafters.eagle3.files import load_head, save_flat
from drafters.frequency import draft_vocabulary
from specdec.core.errors import UserError
from targets import mini
from targets.model_folder import read_arch
from tests.support.cheap import beside
from tests.support.commands import refused
from tests.support.eagle3_worker import (
    RECIPE,
    SHAPE,
    STOPS,
    VOCAB,
    answers,
    made_up,
    target,
    trainer,
)
from tests.support.places import ROOT
from tools.training_throughput import measure
from training.heads import origin_of
from training.packing import pack
from training.real_acceptance import Live, prompts_of
from training.recipe import spec_for
from training.trained import trained_head
from training.trainer import contract_of, initial_state, sign
from training.vocabulary import count_generated

pytestmark = pytest.mark.usefixtures("cheap_programs")


def losses(run: Path, kind: str = "heldout") -> list[dict]:
    rows = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == kind]


def without_speed(run: Path) -> list[dict]:
    rows = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]


def test_a_killed_run_goes_on_bit_for_bit(tmp_path) -> None:
    """20 steps = 10, kill -9 at 20 before it is saved, 10 again."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    with beside("-m", "tests.support.eagle3_worker", str(broken), "10") as dying:
        first = trainer(whole)
        first.train(20)
        _, said = dying.communicate()
    assert dying.returncode == -signal.SIGKILL, said.decode()[-2000:]
    second = trainer(broken)
    assert int(second.state.step) == 10
    second.train(20)
    for ours, theirs in zip(
        jax.tree.leaves(first.state), jax.tree.leaves(second.state), strict=True
    ):
        assert np.array_equal(ours, theirs)
    assert without_speed(whole) == without_speed(broken)


def test_devices_share_the_rows_of_a_batch(tmp_path) -> None:
    """Two devices, each with half of the rows, train as one does but for the order of sums."""
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    recipe = replace(RECIPE, evaluate_every=4, save_every=4)
    script = (
        "import sys; from dataclasses import replace; from pathlib import Path; import jax; "
        "from tests.support.eagle3_worker import RECIPE, trainer; assert jax.device_count() == 2; "
        "recipe = replace(RECIPE, evaluate_every=4, save_every=4); "
        "trainer(Path(sys.argv[1]), recipe=recipe, devices=2).train(4)"
    )
    with beside("-c", script, str(shared), devices=2) as running:
        trainer(alone, recipe=recipe).train(4)
        _, said = running.communicate()
    assert running.returncode == 0, said.decode()[-2000:]
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
    blank = initial_state(spec, RECIPE, origin_of(params), np.arange(VOCAB)).weights
    found = live(blank)
    assert set(found) == {"real_tau_t0", "real_tau_t1"}
    assert all(1 <= tau <= 3 for tau in found.values())
    assert live(blank) == found


def test_an_exported_head_is_the_trained_one(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("training.trained.target_hash", lambda path: path.name)
    run, out = tmp_path / "run", tmp_path / "head"
    spec = spec_for(target()[1], SHAPE, STOPS)
    ids = draft_vocabulary(count_generated(pack(answers(60), 32), spec.vocab), 200, STOPS)
    sign(run, contract_of(RECIPE, spec, {"target": "right"}, False, "float32"), ids)
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


def test_the_commands_refuse_in_one_line(tmp_path, capsys) -> None:
    recipe, nowhere = str(ROOT / "configs/eagle3-mini-cpu.toml"), str(tmp_path / "nowhere")
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


def test_throughput_is_of_whole_steps_whoever_teaches() -> None:
    """Here mini-e's states, repeated to the width of mini's, as E4B's may teach 31B's head."""
    recipe = replace(RECIPE, head=replace(SHAPE, draft_vocab=64), steps=1)
    ours, teacher = (read_arch(mini.path(name)) for name in ("mini", "mini-e"))
    found = measure(recipe, ours, teacher, steps=1)
    assert found["batch"] * found["length"] == 4 * 32
    assert found["tokens_per_second"] == pytest.approx(4 * 32 / found["step_seconds"][0])
