"""An assistant's config.json, as transformers writes it."""

from __future__ import annotations

from typing import Any

from drafters.assistant.spec import AssistantSpec, Clusters
from specdec.core.errors import UserError
from targets.arch import parse_arch

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
    # none of its layers has keys and values of its own: whose they are, pairing says
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
