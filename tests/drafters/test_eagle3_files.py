"""EAGLE-3 heads in and out of both published forms, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st
from safetensors.numpy import load_file, save_file

from drafters.draft_ids import from_offsets, offsets
from drafters.eagle3.files import load_head, save_flat, save_speculators
from drafters.eagle3.spec import Head, default_layers
from specdec.core.errors import UserError
from targets.arch import Arch, parse_arch
from tests.support.eagle3_oracle import FLAGS, SPEC, random_head
from tests.support.tiny import config_of

STOPS = (1, 16)


def target(**changes) -> Arch:
    """An architecture that the oracle's head belongs to: its width and vocabulary, 8 layers."""
    arch = parse_arch(config_of("31b"))
    own = {"hidden": SPEC.hidden, "vocab": SPEC.vocab, "layers": (arch.layers * 2)[:8]}
    return replace(arch, **own | changes)


def save(head: Head, out: Path, form: str, dtype: str = "float32") -> None:
    if form == "flat":
        return save_flat(head, out, STOPS, dtype)
    embedding = np.ones((SPEC.vocab, SPEC.hidden), np.float32)
    return save_speculators(head, out, STOPS, "google/gemma", embedding, 5, dtype)


def edit(folder: Path, **values) -> None:
    """Change config.json; None removes a key."""
    config = json.loads((folder / "config.json").read_text()) | values
    config = {k: v for k, v in config.items() if v is not None or k == "rope_scaling"}
    (folder / "config.json").write_text(json.dumps(config))


def refusal(folder: Path, arch: Arch | None = None) -> str:
    with pytest.raises(UserError) as problem:
        load_head(folder, arch or target())
    assert "\n" not in str(problem.value)
    return str(problem.value)


@pytest.mark.parametrize("form", ["flat", "speculators"])
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_round_trip_is_bitwise(tmp_path, form, flags) -> None:
    head = random_head(**flags)
    save(head, tmp_path, form)
    found = load_head(tmp_path, target())
    assert found.spec == head.spec
    assert np.array_equal(found.target_ids, head.target_ids)
    assert found.weights.keys() == head.weights.keys()
    assert all(np.array_equal(found.weights[n], head.weights[n]) for n in head.weights)


def test_flat_form_has_the_names_and_types_that_engines_read(tmp_path) -> None:
    head = random_head()
    save_flat(head, tmp_path, STOPS)
    stored = load_file(tmp_path / "model.safetensors")
    layer = "input_layernorm hidden_norm post_attention_layernorm".split()
    layer += [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up")]
    names = {f"midlayer.{n}.weight" for n in [*layer, "mlp.down_proj"]}
    assert stored.keys() == names | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert stored["d2t"].dtype == np.int64 and stored["t2d"].dtype == np.bool_
    assert stored["fc.weight"].dtype.name == "bfloat16"
    assert np.array_equal(np.flatnonzero(stored["t2d"]), head.target_ids)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]  # vLLM: by input
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]  # SGLang
    assert config["max_position_embeddings"] == SPEC.max_position
    assert "final_logit_softcapping" not in config


def test_layer_ids_are_read_in_the_numbering_of_their_place(tmp_path) -> None:
    save(random_head(), tmp_path, "flat")
    edit(tmp_path, eagle_config=None)
    assert load_head(tmp_path, target()).spec.layers == (1, 3, 5)
    edit(
        tmp_path,
        eagle_aux_hidden_state_layer_ids=None,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 3, 4]},
    )
    assert load_head(tmp_path, target()).spec.layers == (2, 3, 4)
    edit(tmp_path, eagle_config=None)
    assert load_head(tmp_path, target()).spec.layers == default_layers(8) == (1, 3, 4)
    same = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    edit(tmp_path, **same, eagle_config=same)
    assert "contradicts itself" in refusal(tmp_path)


def test_a_head_of_another_target_is_refused(tmp_path) -> None:
    save(random_head(), tmp_path, "flat")
    assert "width 32, not 48" in refusal(tmp_path, replace(target(), hidden=48))
    assert "vocabulary of 96, not 97" in refusal(tmp_path, replace(target(), vocab=97))
    assert "layers 0 to 3" in refusal(tmp_path, replace(target(), layers=target().layers[:4]))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_act": "gelu"}, "activated by gelu"),
        ({"num_hidden_layers": 2}, "of 2 layers"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rotary"),
        ({"hidden_size": None}, "hidden_size"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 4, 6], "eagle_config": None}, "(-1, 3, 5)"),
        ({"eagle_aux_hidden_state_layer_ids": [4, 4, 6], "eagle_config": None}, "different"),
        ({"eagle_aux_hidden_state_layer_ids": [6, 4, 2], "eagle_config": None}, "ascending"),
        ({"intermediate_size": 47}, "different heads"),
        ({"fc_norm": True}, "lacks the tensor fc_norm.0"),
    ],
)
def test_unclear_configs_are_refused(tmp_path, values, message) -> None:
    save(random_head(), tmp_path, "flat")
    edit(tmp_path, **values)
    assert message in refusal(tmp_path)


def test_speculators_must_say_its_residual(tmp_path) -> None:
    save(random_head(), tmp_path, "speculators")
    edit(tmp_path, norm_before_residual=None)
    assert "norm_before_residual" in refusal(tmp_path)


def test_incomplete_files_are_refused(tmp_path) -> None:
    save(random_head(), tmp_path, "flat")
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    save_file({n: v for n, v in whole.items() if n != "d2t"}, file)
    assert "lacks d2t" in refusal(tmp_path)
    save_file(whole | {"d2t": random_head().target_ids}, file)  # ids where offsets belong
    assert "d2t" in refusal(tmp_path)
    save_file(whole | {"midlayer.self_attn.q_norm.weight": np.ones(8, np.float32)}, file)
    assert "q_norm" in refusal(tmp_path)
    file.write_bytes(file.read_bytes()[:-64])
    assert "damaged" in refusal(tmp_path)
    file.unlink()
    assert "model.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize("count", [4, 5, 6])
def test_colliding_default_layers_are_refused(count) -> None:
    with pytest.raises(UserError, match="name three"):
        default_layers(count)


@given(st.sets(st.integers(0, 999), min_size=1))
def test_draft_ids_survive_their_offsets(ids) -> None:
    target_ids = np.array(sorted(ids))
    assert np.array_equal(from_offsets(offsets(target_ids), 1000), target_ids)


def test_a_head_in_eight_bits_is_read_as_its_values(tmp_path) -> None:
    save(random_head(), tmp_path, "flat")
    stored = load_file(tmp_path / "model.safetensors")
    expected = {}
    for name in [name for name in stored if name.startswith("midlayer.mlp")]:
        scale = np.abs(stored[name]).max(-1, keepdims=True) / np.float32(448)
        values = (stored[name] / scale).astype(ml_dtypes.float8_e4m3fn)
        expected[name] = values.astype(np.float32) * scale
        stored |= {name: values, f"{name}_scale": scale}
    save_file(stored, tmp_path / "model.safetensors")
    found = load_head(tmp_path, target())
    assert len(expected) == 3
    for name, values in expected.items():
        own = name.removeprefix("midlayer.").removesuffix(".weight")
        np.testing.assert_array_equal(found.weights[own], values)
    stored.pop("midlayer.mlp.up_proj.weight_scale")
    save_file(stored, tmp_path / "model.safetensors")
    assert "weight_scale is missing" in refusal(tmp_path)


def test_a_head_with_gelu_and_the_targets_layer_count(tmp_path) -> None:
    """As NeMo Automodel writes the configs of Gemma 4's heads."""
    save(random_head(), tmp_path, "flat")
    edit(tmp_path, hidden_act="gelu_pytorch_tanh", num_hidden_layers=len(target().layers))
    head = load_head(tmp_path, target())
    assert not head.spec.silu
    save(head, tmp_path / "again", "flat")
    assert load_head(tmp_path / "again", target()).spec == head.spec
    edit(tmp_path, num_hidden_layers=3)
    assert "of 3 layers" in refusal(tmp_path)


def test_a_head_for_the_vocabulary_before_padding(tmp_path) -> None:
    save(random_head(), tmp_path, "flat")
    padded = target(vocab=SPEC.vocab + 64)
    assert load_head(tmp_path, padded).target_ids.max() < SPEC.vocab
    assert "vocabulary" in refusal(tmp_path, target(vocab=SPEC.vocab - 1))
