"""Tiny random checkpoints of every Gemma 4 variant, in the released layout, and their oracle.

Norm weights and layer scalars are not 1, windows are shorter than the test sequences, and the
files carry what released ones carry besides: a vision tensor, unused K/V of sharing layers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from targets.arch import parse_arch
from targets.stored import quantise_int8
from targets.tensors import TensorSpec, all_tensors, stored_name

VOCAB = 320
LENGTH = 40
IDS = np.random.default_rng(1).integers(0, VOCAB, (2, LENGTH))
"""Two texts for comparisons with the oracle."""
PREFIX = "model.language_model."


def _pattern(sliding: int, groups: int) -> list[str]:
    return (["sliding_attention"] * sliding + ["full_attention"]) * groups


_COMMON: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 12,
    "max_position_embeddings": 512,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "31b": {
        "layer_types": _pattern(1, 3),
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
    },
    "12b": {
        "model_type": "gemma4_unified_text",
        "layer_types": _pattern(2, 3),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "vocab_size_per_layer_input": 0,
    },
    "26b-a4b": {
        "layer_types": _pattern(1, 2),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "e4b": {
        "layer_types": _pattern(1, 4),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": None,
        "attention_k_eq_v": False,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 4,
    },
    "e2b": {
        "layer_types": _pattern(1, 2),
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "num_global_key_value_heads": None,
        "attention_k_eq_v": False,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
}


def config_of(variant: str) -> dict[str, Any]:
    """config.json as released: multimodal, the decoder under text_config."""
    text = _COMMON | VARIANTS[variant]
    text["num_hidden_layers"] = len(text["layer_types"])
    return {
        "model_type": text["model_type"].removesuffix("_text"),
        "text_config": text,
        "vision_config": {},
        "eos_token_id": [1, 106],
    }


def random_tensors(variant: str, seed: int = 0) -> dict[str, np.ndarray]:
    """float32 tensors by the engine's names, every value exactly representable in bfloat16."""
    random = np.random.default_rng(seed)

    def draw(name: str, spec: TensorSpec) -> np.ndarray:
        noise = random.standard_normal(spec.shape).astype(np.float32)
        if name.endswith("layer_scalar"):
            value = 0.8 + 0.1 * noise
        elif "post_" in name:  # branches smaller than the stream, as trained: noise isn't amplified
            value = 0.5 + 0.1 * noise
        elif len(spec.shape) == 1:
            value = 1 + 0.2 * noise
        else:
            gain = 2 if name == "embed_tokens" else 1
            value = noise * np.float32(gain * spec.shape[-1] ** -0.5)
        return value.astype(ml_dtypes.bfloat16).astype(np.float32)

    specs = all_tensors(parse_arch(config_of(variant)))
    return {name: draw(name, spec) for name, spec in specs.items()}


def write_tiny(
    path: Path, variant: str, storage: str = "bfloat16", shards: int = 1
) -> dict[str, np.ndarray]:
    """Write a checkpoint folder; returns its tensors (as float32, before quantisation).

    storage: bfloat16, float16, float32, or fp8 / int8 (compressed-tensors names, un-fused experts).
    """
    config = config_of(variant)
    tensors = random_tensors(variant)
    specs = all_tensors(parse_arch(config))
    files: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        if storage in ("fp8", "int8") and specs[name].linear:
            files |= _quantised(name, value, storage)
        else:
            kind = {"float16": np.float16, "float32": np.float32}.get(storage, ml_dtypes.bfloat16)
            files[stored_name(PREFIX, name)] = value.astype(kind)
    files["model.vision_tower.patch_embedder.input_proj.weight"] = np.zeros((4, 4), np.float32)
    shared = len(specs) and config["text_config"]["num_kv_shared_layers"]
    if shared:  # released E2B / E4B files contain these, but they are unused
        last = len(config["text_config"]["layer_types"]) - 1
        files[f"{PREFIX}layers.{last}.self_attn.k_proj.weight"] = np.zeros((4, 4), np.float32)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    _save(path, files, shards)
    return tensors


def _quantised(name: str, value: np.ndarray, storage: str) -> dict[str, np.ndarray]:
    if value.ndim == 3:  # experts are stored one by one, gate and up apart
        base, kind = name.rsplit(".", 1)
        out: dict[str, np.ndarray] = {}
        for e, matrix in enumerate(value):
            halves = np.split(matrix, 2) if kind == "gate_up_proj" else [matrix]
            parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            for part, half in zip(parts, halves, strict=True):
                out |= _quantised(f"{base}.{e}.{part}", half, storage)
        return out
    if storage == "int8":
        stored = quantise_int8(value)
        values, scale = stored.values, stored.scale
    else:
        scale = np.abs(value).max(-1) / np.float32(448)
        values = (value / scale[:, None]).astype(ml_dtypes.float8_e4m3fn)
    assert scale is not None
    names = stored_name(PREFIX, name).removesuffix(".weight")
    return {f"{names}.weight": values, f"{names}.weight_scale": scale[:, None]}


def _save(path: Path, files: dict[str, np.ndarray], shards: int) -> None:
    if shards == 1:
        save_file(files, path / "model.safetensors")
        return
    names = sorted(files)
    where: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: files[name] for name in names[i::shards]}
        save_file(part, path / file)
        where |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def oracle(variant: str, tensors: dict[str, np.ndarray]):
    """transformers' own model in float32, eager attention, on these tensors."""
    import torch
    from transformers import (
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        Gemma4UnifiedForCausalLM,
        Gemma4UnifiedTextConfig,
    )

    text = config_of(variant)["text_config"]
    unified = text["model_type"] == "gemma4_unified_text"
    kind = Gemma4UnifiedTextConfig if unified else Gemma4TextConfig
    config = kind(**text, attn_implementation="eager")
    model = (Gemma4UnifiedForCausalLM if unified else Gemma4ForCausalLM)(config).float().eval()
    state = {stored_name("model.", n): torch.tensor(v) for n, v in tensors.items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert all("_proj" not in m and "norm" not in m or ".self_attn." in m for m in missing), missing
    return model
