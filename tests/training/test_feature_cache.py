"""A feature cache has the teacher's own states; one of other data is refused, and incomplete parts
are made again."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from specdec.core.errors import UserError
from targets import mini
from targets.jax.model import Hidden
from tests.support.commands import held, refused, run
from tests.support.distil_worker import source
from tests.support.eagle3_worker import RECIPE, answers, cache_of, trainer
from tests.support.places import ROOT
from training import assemble, feature_cache
from training.distil import claim, features, target_hash
from training.feature_cache import CacheLayout, FeatureCache, joined, with_states
from training.packing import pack, rows_of_step
from training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("cheap_programs")

CONFIGS = ROOT / "configs"
LAYERS = (1, 3, 5)
LENGTH = 32
HIDDEN = 48
SHARD_ROWS = 5
TOLERANCE = 1e-5
"""The forward is a program of its own; on the CPUs seen so far it makes the very same bits."""
TRAINING = pack(answers(60), LENGTH)
HELDOUT = pack(answers(12, 1), LENGTH)
ROWS = joined(TRAINING, HELDOUT)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch) -> None:
    row = LENGTH * (len(LAYERS) + 1) * HIDDEN * 4
    monkeypatch.setattr(feature_cache, "SHARD_BYTES", SHARD_ROWS * row)


def spoken(tokens, documents) -> Hidden:
    """Fake states that encode their tokens and documents."""
    told = (tokens + documents / 7)[..., None].astype(np.float32)
    return Hidden(told.repeat(HIDDEN, -1), -told.repeat(len(LAYERS) * HIDDEN, -1))


def opened(folder, rows=ROWS, **facts) -> FeatureCache:
    return cache_of(folder, rows, LAYERS, **facts)


def shards(folder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("shard-*"))}


def test_training_from_a_cache_is_training_online(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Trainer, "evaluate", lambda self: {})
    recipe, cache = replace(RECIPE, unroll=1, evaluate_every=6, save_every=6), tmp_path / "cache"
    online = trainer(tmp_path / "online", recipe=recipe)
    cached = trainer(tmp_path / "cached", recipe=recipe, cache=cache)
    assert len(shards(cache)) > 1
    losses, states = [], []
    for each in (online, cached):
        each.train(6, lambda row: losses.append(row.get("loss")))
        states.append(jax.tree.leaves(each.state))
    assert np.isclose(losses[2], losses[0], rtol=TOLERANCE)
    for ours, theirs in zip(*states, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


def test_every_row_gets_its_own_states(tmp_path) -> None:
    cache = opened(tmp_path)
    cache.build(spoken, 3)
    for part in with_states(cache, TRAINING, HELDOUT):
        for step in range(4):
            batch = rows_of_step(part, 0, step, 4)
            expected = spoken(batch.tokens, batch.documents)
            assert np.array_equal(batch.states.last, expected.last)
            assert np.array_equal(batch.states.features, expected.features)


def test_a_killed_build_goes_on(tmp_path) -> None:
    """Shards that are whole stand, and no row of theirs is read again."""
    opened(tmp_path / "whole").build(spoken, 2)
    broken, rows_read = opened(tmp_path / "broken"), []

    def killed(count: int) -> None:
        rows_read.append(count)
        if sum(rows_read) > 2 * SHARD_ROWS:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken.build(spoken, 2, killed)
    assert len(shards(tmp_path / "broken")) == 2
    again, more = opened(tmp_path / "broken"), []
    assert again.check_room() == len(ROWS.tokens) - 2 * SHARD_ROWS
    again.build(spoken, 2, more.append)
    assert sum(more) == len(ROWS.tokens) - 2 * SHARD_ROWS
    assert shards(tmp_path / "broken") == shards(tmp_path / "whole")
    assert again.check_room() == 0


def test_bfloat16_keeps_its_bits(tmp_path) -> None:
    def rounded(tokens, documents) -> Hidden:
        return Hidden(*(part.astype(ml_dtypes.bfloat16) for part in spoken(tokens, documents)))

    layout = CacheLayout(len(ROWS.tokens), LENGTH, len(LAYERS) * HIDDEN, HIDDEN, "bfloat16")
    cache = FeatureCache(tmp_path, ROWS, layout, {})
    cache.build(rounded, 4)
    for number in (0, len(ROWS.tokens) - 1):
        row, (one,) = cache.row(number), (slice(number, number + 1),)
        expected = rounded(ROWS.tokens[one], ROWS.documents[one])
        assert row.last.dtype == ml_dtypes.bfloat16 and np.array_equal(row.last, expected.last[0])
    size = sum(file.stat().st_size for file in tmp_path.glob("shard-*"))
    assert 0 <= size - layout.rows * layout.row_bytes < 200 * len(shards(tmp_path))


def test_another_ones_cache_is_refused(tmp_path) -> None:
    opened(tmp_path)
    opened(tmp_path)
    for other, name in (
        (lambda: opened(tmp_path, target="y"), "target"),
        (lambda: cache_of(tmp_path, ROWS, (1, 2, 5)), "layers"),
        (lambda: opened(tmp_path, rows=joined(HELDOUT, TRAINING)), "packing"),
        (lambda: opened(tmp_path, rows=pack(answers(72), 24)), "rows, length, packing"),
    ):
        with pytest.raises(UserError, match=f"features of other {name}"):
            other()
    manifest = json.loads((tmp_path / "cache.json").read_text())
    (tmp_path / "cache.json").write_text(json.dumps(manifest | {"specdec": "0.0"}))
    with pytest.raises(UserError, match="other specdec: "):
        opened(tmp_path)
    with pytest.raises(UserError, match="--feature-cache: cannot write"):
        opened(tmp_path / "cache.json")


def test_a_disk_without_room_is_one_line(tmp_path, monkeypatch) -> None:
    cache, saved = opened(tmp_path), feature_cache.save_file
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**28))
        with pytest.raises(UserError, match="make room, or leave the option out"):
            cache.check_room()

    def full(arrays, file) -> None:
        if len(shards(tmp_path)) == 1:
            file.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        saved(arrays, file)

    with monkeypatch.context() as patch:
        patch.setattr(feature_cache, "save_file", full)
        with pytest.raises(UserError, match="No space left .*make room and repeat"):
            cache.build(spoken, 4)
    assert len(shards(tmp_path)) == 1 and len(list(tmp_path.iterdir())) == 2  # and cache.json
    cache.build(spoken, 4)
    (tmp_path / "shard-00001.safetensors").write_bytes(b"half")
    with pytest.raises(UserError, match="shard-00001.safetensors is damaged"):
        cache.row(SHARD_ROWS)


def test_whoever_may_read_the_folder_may_read_its_shards(tmp_path) -> None:
    opened(tmp_path).build(spoken, 4)
    modes = {file.stat().st_mode for file in tmp_path.iterdir()}
    assert len(shards(tmp_path)) > 1 and len(modes) == 1


class Silent:
    def note(self, line: str) -> None:
        pass


def test_one_process_fills_a_cache_and_all_may_read_it(tmp_path) -> None:
    arch = SimpleNamespace(hidden=HIDDEN)
    teacher: Any = SimpleNamespace(arch=arch, layers=LAYERS, dtype="float32")
    watcher: Any = Silent()

    def claimed() -> FeatureCache:
        return assemble._claim_cache(
            tmp_path, teacher, {"target": "x"}, (TRAINING, HELDOUT), watcher
        )

    with held(tmp_path):
        with pytest.raises(UserError, match="--feature-cache: another process works in"):
            claimed()
        cache = FeatureCache(
            tmp_path,
            ROWS,
            CacheLayout(len(ROWS.tokens), LENGTH, len(LAYERS) * HIDDEN, HIDDEN, "float32"),
            {"target": "x", "data": {"target": "x"}, "layers": LAYERS},
        )
        cache.build(spoken, 4)
        assert not claimed().missing()


def distilled(folder) -> None:
    """Made-up answers, as if mini had written them."""
    claim(folder, source(target=target_hash(mini.path("mini")), rows=8))
    from datasets.arrow_writer import ArrowWriter

    with ArrowWriter(features=features(), path=str(folder / "shard-00000.arrow")) as writer:
        for i, answer in enumerate(answers(8)):
            writer.write(answer | {"row": i, "seed": i})
        writer.finalize()


@pytest.mark.slow
def test_the_command_builds_a_cache_and_trains_from_it(tmp_path, capsys) -> None:
    """Twice from one cache, by two heads; never from another data's."""
    distilled(tmp_path / "data")
    small = (CONFIGS / "eagle3-mini-cpu.toml").read_text()
    for name, value in (("steps", 2), ("length", 64), ("unroll", 1), ("live_prompts", 1)):
        small = re.sub(rf"(?m)^{name} = .*", f"{name} = {value}", small)
    recipe, other = tmp_path / "recipe.toml", tmp_path / "other.toml"
    recipe.write_text(small)
    other.write_text(small.replace("ffw = 384", "ffw = 64"))
    cache = ["--feature-cache", str(tmp_path / "cache")]
    command = ["--data", str(tmp_path / "data"), "--run", str(tmp_path / "run")]
    said = run(capsys, "train-eagle3", str(recipe), *command, *cache)[1]
    assert "rows to do" in said
    again = [*command[:-1], str(tmp_path / "run2"), *cache]
    assert ", 0 rows to do" in run(capsys, "train-eagle3", str(other), *again)[1]
    assert "other feature_cache" in refused(capsys, "train-eagle3", str(recipe), *command)
    other.write_text(small.replace("length = 64", "length = 48"))
    assert "features of other" in refused(capsys, "train-eagle3", str(other), *again)
