"""Block drafters in their three dialects: each means the one spec that its publisher's class
computes, and whatever is unclear is refused by its name. A mistake here costs acceptance and no
exactness, so no other test would see it."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from drafters.dflash.config_json import parse_config
from drafters.dflash.files import load_head
from specdec.core.errors import UserError
from targets.arch import parse_arch
from tests.support.block_heads import CONFIGS, FORMS, FULL, SPECS, random_block, save
from tests.support.tiny import config_of

ARCH = parse_arch(config_of("31b"))


def spec_of(config: dict[str, Any]):
    return parse_config(config)


def changed(form: str, *where: str, **keys: Any) -> dict[str, Any]:
    """A config with these keys, in the part named by `where`; None removes a key."""
    config = copy.deepcopy(CONFIGS[form])
    part = config
    for name in where:
        part = part[name]
    part.update(keys)
    for key in [key for key, value in keys.items() if value is None]:
        del part[key]
    return config


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(UserError) as problem:
        parse_config(config)
    assert "\n" not in str(problem.value)
    return str(problem.value)


@pytest.mark.parametrize("form", FORMS)
def test_a_file_means_its_publishers_head(tmp_path, form) -> None:
    """Layers by output (trap 1), the first slot that predicts (2), the embedding's scale (3),
    causality and windows (4), the body's defaults (7), the soft-cap (9); and all tensors."""
    head = random_block(SPECS[form])
    save(head, CONFIGS[form], tmp_path)
    found = load_head(tmp_path, ARCH)
    assert found.spec == head.spec
    assert (found.target_ids is None) == (head.target_ids is None)
    assert head.target_ids is None or np.array_equal(found.target_ids, head.target_ids)
    assert found.weights.keys() == head.weights.keys()
    assert all(np.array_equal(found.weights[n], head.weights[n]) for n in head.weights)


def test_what_a_missing_key_means_depends_on_the_dialect() -> None:
    assert spec_of(changed("dflash")).first == 1
    assert spec_of(changed("dspark", sample_from_anchor=None)).first == 0
    both_ways = changed("dflash", sliding_window_non_causal=True)
    assert [layer.causal for layer in spec_of(both_ways).body.layers] == [False, False, False]
    one_way = changed("dflash2", sliding_window_non_causal=False)
    assert [layer.causal for layer in spec_of(one_way).body.layers] == [True, False]
    for value in (True, False):
        layers = spec_of(changed("zlab", "dflash_config", causal=value)).body.layers
        assert [layer.causal for layer in layers] == [value] * 3
    inside = changed("zlab", "dflash_config", block_size=5)
    assert spec_of(inside).slots == 5
    swa = changed("zlab", "dflash_config", use_swa=True, swa_window_size=9)
    assert [layer.window for layer in spec_of(swa).body.layers] == [9, 9, None]
    assert spec_of(changed("deepspec", enable_confidence_head=False)).chooser.confidence is False
    llama = changed("dflash", "transformer_layer_config", model_type="llama")
    assert spec_of(llama) == replace(SPECS["dflash"], own_head=False)
    plain = changed("dflash", "transformer_layer_config", layer_types=None)
    assert spec_of(plain).body.layers == (FULL, FULL, FULL)


@pytest.mark.parametrize(
    ("form", "where", "keys", "said"),
    [
        ("dflash", (), {"speculators_model_type": "xpress"}, "speculators_model_type xpress"),
        ("dflash", (), {"fresh": 1}, "config.json has fresh"),
        (
            "dflash",
            ("transformer_layer_config",),
            {"sinks": 1},
            "transformer_layer_config has sinks",
        ),
        ("zlab", ("dflash_config",), {"draft_shift": 1}, "dflash_config has draft_shift"),
        ("zlab", (), {"output_multiplier": 2.0}, "has output_multiplier"),
        ("deepspec", (), {"fresh": 1}, "config.json has fresh"),
        ("zlab", (), {"hidden_act": "gelu"}, "hidden_act gelu: only silu"),
        ("zlab", (), {"use_sliding_window": False}, "use_sliding_window False"),
        ("zlab", (), {"rope_scaling": {"rope_type": "yarn"}}, "rope_type yarn"),
        ("dspark", (), {"markov_head_type": "rnn"}, "markov_head_type rnn: only vanilla"),
        ("dspark", (), {"mask_token_id": None}, "mask_token_id"),
        ("dspark", (), {"target_hidden_size": 99}, "target_hidden_size 99"),
        ("dflash2", (), {"conv_kernel_size": 3}, "conv_kernel_size 3"),
        ("deepspec", (), {"hidden_activation": "silu"}, "hidden_activation silu"),
        ("deepspec", (), {"attention_k_eq_v": False}, "attention_k_eq_v False"),
        ("deepspec", (), {"architectures": ["Gemma4Model"]}, "no block drafter's config.json"),
    ],
)
def test_what_is_unclear_is_refused_by_name(form, where, keys, said) -> None:
    assert said in refusal(changed(form, *where, **keys))


@pytest.mark.parametrize(
    ("form", "keys", "said"),
    [
        ("dflash", {"block_size": 1}, "nothing to draft"),
        ("dflash", {"aux_hidden_state_layer_ids": [1, 1]}, "different ones"),
        ("dflash", {"aux_hidden_state_layer_ids": [0, 3, 5]}, "layers (-1, 2, 4)"),
        ("dflash", {"aux_hidden_state_layer_ids": [1, 3, 7]}, "layers 0 to 5"),
        ("dflash", {"mask_token_id": 320}, "mask_token_id"),
        ("dflash", {"block_size": 13}, "a window must hold a block"),
        ("dflash2", {"draft_vocab_size": 99}, "whole vocabulary"),
        ("dflash2", {"selector_top_k": 0}, "selector_top_k"),
        ("dflash2", {"conv_group_size": 7}, "conv_group_size 7"),
    ],
)
def test_impossible_heads_are_refused(tmp_path, form, keys, said) -> None:
    save(random_block(SPECS[form]), changed(form, **keys), tmp_path)
    with pytest.raises(UserError) as problem:
        load_head(tmp_path, ARCH)
    assert said in str(problem.value)


def test_a_head_of_another_target_is_refused(tmp_path) -> None:
    save(random_block(SPECS["zlab"]), CONFIGS["zlab"], tmp_path)
    for change, said in (({"hidden": 64}, "width 48, not 64"), ({"vocab": 999}, "of 320, not 999")):
        with pytest.raises(UserError, match=said):
            load_head(tmp_path, replace(ARCH, **change))


def test_incomplete_and_damaged_files_are_refused(tmp_path) -> None:
    head = random_block(SPECS["dspark"])
    save(head, CONFIGS["dspark"], tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)

    def said(**changes: np.ndarray | None) -> str:
        stored = {name: value for name, value in (whole | changes).items() if value is not None}
        save_file(stored, file)
        with pytest.raises(UserError) as problem:
            load_head(tmp_path, ARCH)
        return str(problem.value)

    assert "lacks tensors: fc.weight" in said(**{"fc.weight": None})
    assert "lacks d2t" in said(d2t=None)
    assert "lacks lm_head.weight" in said(**{"lm_head.weight": None})
    assert "nothing reads: mask_embedding" in said(mask_embedding=np.ones(48, np.float32))
    assert "norm.weight has shape [47]" in said(**{"norm.weight": np.ones(47, np.float32)})
    assert "does not map draft ids" in said(d2t=whole["d2t"] + np.arange(200))
    broken = whole["fc.weight"].copy()
    broken[0, 0] = np.nan
    assert "fc.weight holds NaN" in said(**{"fc.weight": broken})


def test_code_beside_the_weights_is_never_run(tmp_path) -> None:
    save(random_block(SPECS["zlab"]), CONFIGS["zlab"], tmp_path)
    (tmp_path / "dflash.py").write_text("raise SystemExit(1)\n")
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "dflash.DFlashDraftModel"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_head(tmp_path, ARCH).spec == SPECS["zlab"]
