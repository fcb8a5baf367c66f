"""An assistant's config.json, as transformers writes it."""

from __future__ import annotations

from typing import Any

from drafters.assistant.spec import AssistantSpec, Clusters
from specdec.core.errors import UserError
from targets.arch import LayerSpec, parse_arch

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
OFF = ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block")
OFF += ("use_double_wide_mlp",)
"""What an assistant's decoder does not have."""


def parse_config(config: dict[str, Any]) -> AssistantSpec:
    """Not yet paired with a target. Raises UserError for what is no assistant, or not a whole
    one."""
    if config.get("model_type") not in MODEL_TYPES:
        raise UserError(
            f"model_type {config.get('model_type')!r} is no Gemma 4 assistant "
            f"({', '.join(MODEL_TYPES)}): name the folder of a …-it-assistant"
        )
    try:
        return _parse(config, config["text_config"])
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise UserError(
            f"the assistant's config.json lacks or misstates something ({type(problem).__name__}: "
            f"{problem}): download it again"
        ) from None


def _parse(config: dict[str, Any], text: dict[str, Any]) -> AssistantSpec:
    _refuse_others(text)
    # no layer has keys and values of its own: `paired` ties each to a layer of the target
    arch = parse_arch(text | {"num_kv_shared_layers": 0, "tie_word_embeddings": True})
    clusters = None
    if config.get("use_ordered_embeddings"):
        most = int(config.get("num_centroids", 2048))
        clusters = Clusters(most, min(most, int(config.get("centroid_intermediate_top_k", 32))))
        if clusters.count < 1 or clusters.read < 1 or arch.vocab % clusters.count:
            raise UserError(
                f"the assistant's {arch.vocab} words do not divide into {clusters.count} clusters "
                f"of which {clusters.read} are read: download it again"
            )
    tied = bool(config.get("tie_word_embeddings", True))
    return AssistantSpec(int(config["backbone_hidden_size"]), arch, clusters, tied)


def _refuse_others(text: dict[str, Any]) -> None:
    has = [key for key in OFF if text.get(key)]
    if has:
        raise UserError(f"the assistant's config.json sets {', '.join(has)}: no assistant has that")
    layers = int(text["num_hidden_layers"])
    shared = int(text.get("num_kv_shared_layers") or layers)
    if shared != layers:
        raise UserError(
            f"{layers - shared} of the assistant's {layers} layers have keys and values of their "
            "own: in a Gemma 4 assistant all read the target's"
        )


def config_of(spec: AssistantSpec) -> dict[str, Any]:
    """A paired assistant's config.json, as transformers writes it."""
    arch, clusters = spec.arch, spec.clusters
    near = next(layer for layer in arch.layers if layer.sliding)
    far = next(layer for layer in arch.layers if not layer.sliding)
    kinds = {True: "sliding_attention", False: "full_attention"}
    text = (
        {
            "model_type": "gemma4_text",
            "vocab_size": arch.vocab,
            "hidden_size": arch.hidden,
            "intermediate_size": near.ffw,
            "num_hidden_layers": len(arch.layers),
            "num_kv_shared_layers": len(arch.layers),
            "layer_types": [kinds[layer.sliding] for layer in arch.layers],
            "num_attention_heads": near.heads,
            "num_key_value_heads": near.kv_heads,
            "head_dim": near.head_dim,
            "global_head_dim": far.head_dim,
            "attention_k_eq_v": far.kv_heads != near.kv_heads,  # else what follows is not read
            "num_global_key_value_heads": far.kv_heads,
            "sliding_window": near.window,
            "max_position_embeddings": arch.max_position,
            "rope_parameters": {
                kinds[False]: _rope(far, "proportional"),
                kinds[True]: _rope(near, "default"),
            },
            "rms_norm_eps": arch.eps,
            "hidden_activation": "gelu_pytorch_tanh",
            "final_logit_softcapping": arch.softcap,
            "tie_word_embeddings": True,
        }
        | dict.fromkeys(OFF[:2], 0)
        | dict.fromkeys(OFF[2:], False)
    )
    return {
        "model_type": MODEL_TYPES[0],
        "architectures": ["Gemma4AssistantForCausalLM"],
        "text_config": text,
        "backbone_hidden_size": spec.backbone,
        "use_ordered_embeddings": clusters is not None,
        "num_centroids": clusters.count if clusters else 2048,
        "centroid_intermediate_top_k": clusters.read if clusters else 32,
        "tie_word_embeddings": spec.tied,
    }


def _rope(layer: LayerSpec, kind: str) -> dict[str, Any]:
    rope, pairs = layer.rope, layer.head_dim // 2
    made: dict[str, Any] = {"rope_type": kind, "rope_theta": rope.theta}
    made |= {"factor": rope.factor} if rope.factor != 1.0 else {}
    return made | ({} if kind == "default" else {"partial_rotary_factor": rope.rotated / pairs})
