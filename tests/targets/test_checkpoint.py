"""Files in, and what is wrong with files: one line that names the thing and the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import targets
from specdec.core.errors import UserError
from targets.arch import parse_arch, released
from targets.checkpoint import Checkpoint
from targets.jax.load import JaxOptions, load_target, make_plan, width_for
from targets.layer_groups import layer_groups
from targets.model_folder import read_arch
from targets.stored import dequantise, quantise_int8
from targets.tensors import all_tensors
from tests.support.tiny import PREFIX, VARIANTS, config_of, write_tiny


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("storage", "shards"), [("bfloat16", 1), ("float32", 3), ("float16", 1)])
def test_every_tensor_arrives(tmp_path, variant, storage, shards):
    tensors = write_tiny(tmp_path, variant, storage, shards)
    checkpoint = Checkpoint(tmp_path, read_arch(tmp_path))
    assert checkpoint.specs.keys() == tensors.keys()
    for name, expected in tensors.items():
        tolerance = 1e-7 if storage == "float16" else 0  # f16 subnormals are coarser than bf16
        np.testing.assert_allclose(dequantise(checkpoint.read(name)), expected, 0, tolerance)


@pytest.mark.parametrize("variant", ["31b", "26b-a4b"])
def test_fp8_and_int8_keep_their_scales(tmp_path, variant):
    for storage, kind in (("fp8", ml_dtypes.float8_e4m3fn), ("int8", np.int8)):
        tensors = write_tiny(tmp_path / storage, variant, storage)
        checkpoint = Checkpoint(tmp_path / storage, read_arch(tmp_path / storage))
        name = "layers.0.mlp.gate_proj"
        stored = checkpoint.read(name)
        assert stored.values.dtype == kind and stored.scale.dtype == np.float32
        error = np.abs(dequantise(stored) - tensors[name]).max()
        assert error < 0.07 * np.abs(tensors[name]).max()
        assert checkpoint.read("layers.0.input_layernorm").scale is None


def test_int8_round_trip_is_within_half_a_step():
    values = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    stored = quantise_int8(values)
    assert (np.abs(dequantise(stored) - values) <= stored.scale[:, None] * 0.501).all()


RELEASED = Path(targets.__file__).parent / "released"


def edit(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def refuses(path, *words):
    with pytest.raises(UserError) as refusal:
        load_target(path, JaxOptions(max_len=64))
    message = str(refusal.value)
    assert "\n" not in message and all(word in message for word in words), message


def test_missing_and_unused_tensors_are_named(tmp_path):
    write_tiny(tmp_path, "31b")
    edit(tmp_path, lambda t: t.pop(f"{PREFIX}layers.3.mlp.up_proj.weight"))
    refuses(tmp_path, "lacks", "layers.3.mlp.up_proj.weight")
    write_tiny(tmp_path, "31b")
    edit(tmp_path, lambda t: t.update({f"{PREFIX}layers.0.gate.weight": np.zeros(3, np.float32)}))
    refuses(tmp_path, "unused", "layers.0.gate.weight")


def test_wrong_shapes_are_named(tmp_path):
    write_tiny(tmp_path, "31b")
    edit(tmp_path, lambda t: t.update({f"{PREFIX}norm.weight": np.zeros(7, np.float32)}))
    refuses(tmp_path, "norm.weight", "[7]", "[48]")


def test_truncated_and_missing_shards(tmp_path):
    write_tiny(tmp_path, "31b")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    refuses(tmp_path, "truncated", "download it again")
    file.unlink()
    refuses(tmp_path, "neither")
    write_tiny(tmp_path / "parts", "31b", shards=3)
    (tmp_path / "parts" / "model-00002-of-00003.safetensors").unlink()
    refuses(tmp_path / "parts", "model-00002-of-00003.safetensors", "missing")


def test_a_scale_that_is_missing_or_blockwise(tmp_path):
    name = f"{PREFIX}layers.0.mlp.up_proj.weight_scale"
    write_tiny(tmp_path, "31b", "int8")
    edit(tmp_path, lambda t: t.pop(name))
    refuses(tmp_path, name, "missing")
    edit(tmp_path, lambda t: t.update({name: np.ones((2, 2), np.float32)}))
    refuses(tmp_path, "layers.0.mlp.up_proj.weight", "[2, 2]", "per output channel")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llama"}, ["unknown model_type", "llama", "gemma4"]),
        ({"num_hidden_layers": 3}, ["layer_types", "3"]),
        ({"hidden_size": None}, ["lacks hidden_size"]),
        ({"layer_types": ["linear_attention"] * 6}, ["linear_attention"]),
        ({"num_attention_heads": 7}, ["7 query heads"]),
        ({"hidden_activation": "silu"}, ["silu", "gelu_pytorch_tanh"]),
        ({"num_kv_shared_layers": 6}, ["num_kv_shared_layers"]),
    ],
)
def test_configs_that_make_no_sense(change, words):
    text = config_of("31b")["text_config"] | change
    with pytest.raises(UserError) as refusal:
        parse_arch(text)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_config_that_is_missing_or_no_json(tmp_path):
    refuses(tmp_path, "config.json")
    (tmp_path / "config.json").write_text("{")
    refuses(tmp_path, "not valid JSON")


def test_per_layer_config_replaces_the_global_keys():
    """transformers >= 5.15 saves head sizes per layer instead of global_head_dim."""
    text = dict(config_of("31b")["text_config"])
    released = parse_arch(text)
    for key in ("global_head_dim", "num_global_key_value_heads"):
        text.pop(key)
    text["per_layer_config"] = {
        str(i): {"head_dim": 32, "num_key_value_heads": 2}
        for i, kind in enumerate(text["layer_types"])
        if kind == "full_attention"
    }
    assert parse_arch(text) == released


@pytest.mark.parametrize("name", ["gemma-4-e4b", "gemma-4-31b", "gemma-4-26b-a4b"])
def test_what_transformers_saves_is_read_back(name, tmp_path):
    """Twelve layers and more: transformers zero-pads the layer numbers that it saves."""
    from transformers import Gemma4TextConfig

    text = json.loads((RELEASED / f"{name}.json").read_text())
    Gemma4TextConfig(**text).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "global_head_dim" not in saved and "per_layer_config" in saved
    assert read_arch(tmp_path) == released(name)


@pytest.mark.parametrize("int8", [False, True])
def test_a_file_that_mixes_wide_and_quantised_layers(tmp_path, int8):
    """Third-party recipes leave some layers alone; layers that are scanned together are alike."""
    write_tiny(tmp_path / "wide", "31b")
    write_tiny(tmp_path / "mixed", "31b", "int8")
    name = f"{PREFIX}layers.0.self_attn.q_proj"
    wide = load_file(tmp_path / "wide" / "model.safetensors")[f"{name}.weight"]

    def widen(tensors):
        tensors.pop(f"{name}.weight_scale")
        tensors[f"{name}.weight"] = wide

    edit(tmp_path / "mixed", widen)
    target = load_target(
        tmp_path / "mixed", JaxOptions(max_len=64, narrow="int8" if int8 else None)
    )
    stack = target.params.segments[0][0]["self_attn.q_proj"]
    values = stack.values * stack.scale[..., None] if int8 else stack
    checkpoint = Checkpoint(tmp_path / "mixed", read_arch(tmp_path / "mixed"))
    for repeat, layer in enumerate((0, 2, 4)):
        expected = dequantise(checkpoint.read(f"layers.{layer}.self_attn.q_proj"))
        step = np.abs(expected).max() / 127
        assert np.abs(np.asarray(values)[repeat] - expected).max() <= (step if int8 else 1e-6)


@pytest.mark.parametrize("index", ["{}", "{", '{"weight_map": [1]}', '{"weight_map": 3}'])
def test_an_index_that_is_no_index(tmp_path, index):
    write_tiny(tmp_path, "31b", shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    refuses(tmp_path, "weight_map", "download it again")


@pytest.mark.parametrize(
    "change",
    [{"hidden_size": "abc"}, {"num_key_value_heads": 0}, {"layer_types": 3}, {"head_dim": []}],
)
def test_config_values_of_the_wrong_kind(change):
    with pytest.raises(UserError, match="config.json"):
        parse_arch(config_of("31b")["text_config"] | change)


@pytest.mark.parametrize("variant", VARIANTS)
def test_segments_cover_every_layer_once(variant):
    arch = parse_arch(config_of(variant))
    covered = []
    for group in layer_groups(arch):
        for g in range(group.repeats):
            for j, layer in enumerate(group.pattern):
                assert arch.layers[group.layer(g, j)] == layer
                covered.append(group.layer(g, j))
    assert covered == list(range(len(arch.layers)))


def test_the_plan_refuses_impossible_sizes():
    arch = parse_arch(config_of("31b"))
    for options, words in [
        (JaxOptions(slots=0), "slots"),
        (JaxOptions(max_len=100_000), "max-len"),
        (JaxOptions(k=32, max_len=64), "K must be"),
        (JaxOptions(k=-1, max_len=64), "K must be"),
    ]:
        with pytest.raises(UserError, match=words):
            make_plan(arch, options)
    assert [width_for(k) for k in (0, 4, 7, 8, 15, 31)] == [8, 8, 8, 16, 16, 32]


@pytest.mark.parametrize(
    ("name", "billions"),
    [("e2b", 4.63), ("e4b", 7.46), ("12b", 11.91), ("26b-a4b", 25.23), ("31b", 30.70)],
)
def test_released_dimensions_have_the_published_parameter_counts(name, billions):
    specs = all_tensors(released(f"gemma-4-{name}"))
    count = sum(int(np.prod(spec.shape)) for spec in specs.values())
    assert round(count / 1e9, 2) == billions
