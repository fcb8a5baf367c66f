"""A checkpoint's image side: `vision_config` and the files decide whether there is one, each tensor
is there and read, its bytes are counted before anything is loaded, and it can stay on disk."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specdec.assembly.model import load_model
from specdec.core.config import ModelConfig, SpeculationConfig
from specdec.core.errors import UserError
from targets.cuda.footprint import TargetShape, need
from targets.jax import memory
from targets.jax.load import JaxOptions
from targets.model_folder import read_arch
from targets.vision.files import VisionFiles
from targets.vision.rows import ROWS_BYTES
from targets.vision.spec import PROJECTOR, read_vision
from targets.vision.tensors import vision_tensors
from tests.support.pictures import VISION, write_seeing
from tests.support.tiny import write_tiny
from tools import seeing_mini

NARROW = 2
"""Bytes of a value in bfloat16."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {v: write_seeing(tmp_path_factory.mktemp("seeing") / v, v) for v in VISION}


def changed(source, path, change):
    """A copy with its config and tensors changed."""
    path.mkdir()
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    change(config, tensors)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("variant", VISION)
def test_keys_decide_which_kind_it_is(folders, variant):
    spec = read_vision(folders[variant])
    assert spec is not None and spec.usual == spec.budget == 70
    assert (spec.tower is None) == (variant == "12b")
    assert spec.patches.cell == 12
    arch = read_arch(folders[variant])
    assert arch.pictures_both_ways == (variant != "e4b")
    files = VisionFiles(folders[variant], spec, arch.hidden)
    shapes = {name: files.read(name).shape for name in files.shapes}
    assert shapes == vision_tensors(spec, arch.hidden)
    if variant == "e4b":
        scalars = [name for name in shapes if name.endswith(("_min", "_max"))]
        assert len(scalars) == 2 * 7 * 4 and {files.read(name).shape for name in scalars} == {()}


def test_text_checkpoints_have_none(folders, tmp_path):
    write_tiny(tmp_path / "text", "31b")
    assert read_vision(tmp_path / "text") is None

    def dropped(config, tensors):
        for name in [n for n in tensors if "vision" in n]:
            del tensors[name]

    assert read_vision(changed(folders["31b"], tmp_path / "dropped", dropped)) is None

    def unset(config, tensors):
        config["vision_config"] = None

    assert read_vision(changed(folders["31b"], tmp_path / "unset", unset)) is None


def _lacks(config, tensors):
    del tensors["model.vision_tower.std_bias"]


def _more(config, tensors):
    tensors["model.vision_tower.encoder.layers.9.mlp.x.weight"] = np.zeros(3, np.float32)


def _wide(config, tensors):
    tensors[f"model.{PROJECTOR}"] = np.zeros((7, 7), np.float32)


def _broken(config, tensors):
    tensors[f"model.{PROJECTOR}"] = np.full((48, 24), np.nan, np.float32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_lacks, "lacks tensors of images: model.vision_tower.std_bias"),
        (_more, "unused tensors of images: model.vision_tower.encoder.layers.9"),
        (_wide, r"has shape \[7, 7\], vision_config needs \[48, 24\]"),
        (_broken, "NaN or infinity"),
    ],
)
def test_files_are_read_whole_and_strictly(folders, tmp_path, change, words):
    path = changed(folders["31b"], tmp_path / "changed", change)
    spec = read_vision(path)
    assert spec is not None
    with pytest.raises(UserError, match=words) as refused:
        for name in (files := VisionFiles(path, spec, 48)).shapes:
            files.read(name)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("hidden_activation", "relu", "--images off"),
        ("num_key_value_heads", 1, "--images off"),
        ("rope_parameters", {"rope_type": "yarn"}, "--images off"),
        ("default_output_length", 81, "70, 140, 280, 560, 1120"),
        ("hidden_size", "wide", "makes no sense"),
        ("position_embedding_size", 100, "table has 100"),
    ],
)
def test_another_tower_is_refused(folders, tmp_path, name, value, words):
    def change(config, tensors):
        config["vision_config"][name] = value

    with pytest.raises(UserError, match=words):
        read_vision(changed(folders["31b"], tmp_path / "other", change))


def test_the_processors_file_is_followed_or_refused(folders, tmp_path):
    path = changed(folders["31b"], tmp_path / "copy", lambda config, tensors: None)
    file = path / "processor_config.json"
    odd = {"size": {"height": 224, "width": 224}, "do_normalize": False, "resample": 3}
    file.write_text(json.dumps({"image_processor": {"max_soft_tokens": 70} | odd}))
    assert read_vision(path) == read_vision(folders["31b"])
    for change in ({"resample": 2}, {"do_normalize": True, "image_mean": [0.5] * 3}):
        file.write_text(json.dumps({"image_processor": odd | change}))
        with pytest.raises(UserError, match="normalises pictures or resizes"):
            read_vision(path)


def test_budgets_are_those_of_gemma(folders):
    with pytest.raises(UserError, match="--image-tokens must be one of 70, 140"):
        read_vision(folders["31b"], budget=100)
    with pytest.raises(UserError, match="positions"):
        read_vision(folders["31b"], budget=280)


def test_bytes_are_counted_before_anything_is_loaded(folders):
    path = folders["31b"]
    spec, arch = read_vision(path), read_arch(path)
    assert spec is not None
    values = sum(int(np.prod(shape)) for shape in vision_tensors(spec, arch.hidden).values())
    options = JaxOptions(slots=1, max_len=64, dtype="bfloat16")
    blind = memory.need(arch, options, None)(64)
    sees = memory.need(arch, replace(options, vision=spec), None)(64)
    assert sees.weights - blind.weights == NARROW * values
    assert sees.workspace - blind.workspace > ROWS_BYTES
    assert sees.cache > blind.cache  # rings hold a whole picture
    shape = TargetShape(1, 256, 5, 256, "bfloat16", "bfloat16")
    one, other = need(arch, shape), need(arch, replace(shape, vision=spec))
    assert other.weights - one.weights == NARROW * values
    assert other.workspace - one.workspace > ROWS_BYTES


def test_the_image_side_stays_on_disk(tmp_path):
    folder = str(seeing_mini.write(tmp_path / "seeing"))
    plain = SpeculationConfig(drafter="none", k=0)
    config = ModelConfig(folder, slots=1, max_len=256, images="off")
    assert load_model(config, plain).target.vision is None
    assert load_model(replace(config, images="auto"), plain).target.vision is not None
    for wrong in (replace(config, image_tokens=70), replace(config, model="mini", image_tokens=70)):
        with pytest.raises(UserError, match="--image-tokens is for models that take pictures"):
            load_model(wrong, plain)


def test_a_checkpoint_whose_image_side_makes_no_sense_says_its_text(tmp_path):
    """The start says why no pictures are taken; who asked for them is refused."""
    folder = seeing_mini.write(tmp_path / "seeing")
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["position_embedding_size"] = 8
    (folder / "config.json").write_text(json.dumps(config))
    plain = SpeculationConfig(drafter="none", k=0)
    asked = ModelConfig(str(folder), slots=1, max_len=256)
    model = load_model(asked, plain)
    assert model.target.vision is None
    assert [note for note in model.notes if "pictures are not taken" in note and "8" in note]
    with pytest.raises(UserError, match="this model's table has 8"):
        load_model(replace(asked, image_tokens=70), plain)


def test_what_a_towers_config_leaves_out_is_transformers_default(tmp_path):
    folder = seeing_mini.write(tmp_path / "seeing")
    config = json.loads((folder / "config.json").read_text())
    named = read_vision(folder)
    assert named is not None and named.tower is not None
    del config["vision_config"]["pooling_kernel_size"], config["vision_config"]["patch_size"]
    (folder / "config.json").write_text(json.dumps(config))
    found = read_vision(folder)
    assert found is not None and (found.patches.side, found.patches.pool) == (16, 3)
