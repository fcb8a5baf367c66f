"""Which of an answer's tokens teach an EAGLE-3 head; data and recipes that can't are refused."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from drafters.eagle3.spec import default_layers
from drafters.frequency import draft_vocabulary
from specdec.core.errors import UserError
from targets import mini
from targets.arch import released
from targets.model_folder import read_arch
from tests.support.eagle3_worker import RECIPE, SHAPE, STOPS, answers, target
from tests.support.places import ROOT
from training.packing import PADDING, pack, rows_of_step
from training.recipe import read_recipe, spec_for
from training.trainer import contract_of, sign
from training.unroll import masks
from training.vocabulary import coverage

masks_of = jax.jit(masks, static_argnums=1)
CONFIGS = ROOT / "configs"


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 999), st.integers(1, 5))
def test_masks_are_their_definition(seed, steps) -> None:
    rows = jax.tree.map(lambda part: part[:4], pack(answers(8, seed), 24))
    for n, mask in enumerate(map(np.asarray, masks_of(rows, steps))):
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
    newer = spec_for(target()[1], replace(SHAPE, fc_norm=True, norm_output=True), STOPS)
    assert newer.fc_norm and newer.norm_output
    spec = spec_for(target()[1], SHAPE, STOPS)
    sign(tmp_path, contract_of(RECIPE, spec, {}, False, "float32"), np.arange(3))
    sign(tmp_path, contract_of(RECIPE, spec, {}, False, "float32"), np.arange(3))
    other = contract_of(replace(RECIPE, seed=4), spec, {"x": 1}, False, "bfloat16")
    with pytest.raises(UserError, match="other recipe, data, dtype"):
        sign(tmp_path, other, np.arange(3))
    with pytest.raises(UserError, match="missing"):
        read_recipe(tmp_path / "none.toml")
    (tmp_path / "odd.toml").write_text("steps = 3\ncolour = 1\n")
    with pytest.raises(UserError, match="compare with"):
        read_recipe(tmp_path / "odd.toml")
    shipped = (CONFIGS / "eagle3-mini.toml").read_text(encoding="utf-8")
    assert read_recipe(CONFIGS / "eagle3-mini.toml").loss == "lk"
    (tmp_path / "loss.toml").write_text(shipped.replace('loss = "lk"', 'loss = "l1"'))
    with pytest.raises(UserError, match="loss .*got 'l1'"):
        read_recipe(tmp_path / "loss.toml")


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ('steps = "2000"', "steps should be a valid integer, got '2000'"),
        ("steps = true", "steps .*integer, got True"),
        ("steps = 1.5", "steps .*integer, got 1.5"),
        ("steps = 0", "steps .*greater than or equal to 1, got 0"),
        ("colour = 1", "steps is missing; colour is not a key that is known"),
        ("steps = ", "not valid TOML"),
        ("steps = 8\nhead = 3", "not valid TOML|head"),
    ],
)
def test_a_bad_recipe_is_one_line_with_file_and_key(tmp_path, wrong, expected) -> None:
    shipped = (CONFIGS / "eagle3-mini-cpu.toml").read_text(encoding="utf-8")
    file = tmp_path / "bad.toml"
    file.write_text(shipped.replace("steps = 300", wrong))
    with pytest.raises(UserError, match=f"bad.toml.*({expected})") as refusal:
        read_recipe(file)
    assert "\n" not in str(refusal.value)


def test_bad_keys_of_a_recipes_tables_are_named(tmp_path) -> None:
    shipped = (CONFIGS / "eagle3-mini-cpu.toml").read_text(encoding="utf-8")
    (tmp_path / "bad.toml").write_text(shipped.replace("ffw = 384", "ffw = 'wide'\nffv = 3"))
    with pytest.raises(UserError, match="head.ffw should .*'wide'; head.ffv is not"):
        read_recipe(tmp_path / "bad.toml")


@pytest.mark.parametrize("recipe", sorted(CONFIGS.glob("eagle3-*.toml")), ids=lambda p: p.stem)
def test_the_shipped_recipes_fit_their_targets(recipe) -> None:
    name = recipe.stem.removeprefix("eagle3-")
    arch = read_arch(mini.path("mini")) if name.startswith("mini") else released(f"gemma-4-{name}")
    spec = spec_for(arch, read_recipe(recipe).head, STOPS)
    assert spec.layers == default_layers(len(arch.layers))
