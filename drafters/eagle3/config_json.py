"""A head's config.json: the flat form (vLLM, SGLang, SpecForge) and the speculators form.

The trap: `eagle_aux_hidden_state_layer_ids` at the top level numbers layers by their input (vLLM,
speculators), under `eagle_config` by their output (SGLang, SpecForge). Both are written, each in
its own numbering; a file in which the two contradict each other is refused.
"""

from __future__ import annotations

from typing import Any

from drafters.eagle3.spec import HeadSpec, default_layers
from specdec.core.errors import UserError

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
"""Of the feed-forward gate: Llama's, and Gemma's, which NeMo trains with."""
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
OUTSIDE = ("fc", "norm", "lm_head", "input_norm", "fc_norm.")
"""Tensors that are not the decoder layer's."""


def stored_name(name: str, prefix: str) -> str:
    """A tensor's name in a file with this prefix for the layer (`midlayer.` or `layers.0.`)."""
    outside = name in OUTSIDE or name.startswith("fc_norm.")
    return ("" if outside else prefix) + name + ".weight"


def flat_config(spec: HeadSpec, stop_ids: tuple[int, ...]) -> dict[str, Any]:
    """The form that vLLM, SGLang and SpecForge read. No soft-cap: SGLang would apply it to the
    draft. norm_output only if true: SpecForge reads a false one as no final norm at all."""
    shared = {name: v for name, v in _shared(spec).items() if name != "norm_output" or v}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_llama(spec, stop_ids),
        **shared,
        "eagle_config": {
            "use_aux_hidden_state": True,
            LAYER_IDS: list(spec.layers),
            "norm_before_fc": spec.norm_before_fc,
        },
    }


def speculators_config(
    spec: HeadSpec, stop_ids: tuple[int, ...], verifier: str, architectures: list[str], k: int
) -> dict[str, Any]:
    """As speculators and vLLM read it. verifier: the target's folder or hub name."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": k,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        **_shared(spec),
        "transformer_layer_config": _llama(spec, stop_ids),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
    }


def _shared(spec: HeadSpec) -> dict[str, Any]:
    return {
        "draft_vocab_size": spec.draft_vocab,
        "num_aux_hidden_states": len(spec.layers),
        LAYER_IDS: [layer + 1 for layer in spec.layers],
        **{flag: getattr(spec, flag) for flag in FLAGS},
    }


def _llama(spec: HeadSpec, stop_ids: tuple[int, ...]) -> dict[str, Any]:
    window = {"layer_types": ["sliding_attention"], "sliding_window": spec.window}
    return {
        "model_type": "llama",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffw,
        "num_hidden_layers": 1,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": ACTIVATIONS[0 if spec.silu else 1],
        "rms_norm_eps": spec.eps,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.max_position,
        "rope_theta": spec.theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 2,
        "pad_token_id": 0,
        "eos_token_id": list(stop_ids),
        "torch_dtype": "bfloat16",
        **(window if spec.window else {}),
    }


def parse_config(config: dict[str, Any], target_layers: int) -> HeadSpec:
    """Either form to a spec. target_layers: of the target, for files that name no layers.

    Raises UserError for what this head can't be: more layers, another activation, other rotary
    embeddings, or a config that consumers read in different ways.
    """
    try:
        return _parse(config, target_layers)
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise UserError(
            f"the head's config.json lacks or misstates something ({type(problem).__name__}: "
            f"{problem}): download or export it again"
        ) from None


def _parse(config: dict[str, Any], target_layers: int) -> HeadSpec:
    speculators = "speculators_model_type" in config
    llama = config["transformer_layer_config"] if speculators else config
    _refuse_others(config, llama, target_layers)
    rope = {**(llama.get("rope_parameters") or {}), **(llama.get("rope_scaling") or {})}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise UserError(f"the head's rotary embedding {rope} is not supported: only the default is")
    sliding = "sliding_attention" in (llama.get("layer_types") or ())
    hidden, heads = int(llama["hidden_size"]), int(llama["num_attention_heads"])
    return HeadSpec(
        hidden=hidden,
        ffw=int(llama["intermediate_size"]),
        heads=heads,
        kv_heads=int(llama.get("num_key_value_heads") or heads),
        head_dim=int(llama.get("head_dim") or hidden // heads),
        vocab=int(llama["vocab_size"]),
        draft_vocab=int(config.get("draft_vocab_size") or llama["vocab_size"]),
        layers=_layers(config, target_layers),
        max_position=int(llama["max_position_embeddings"]),
        theta=float(rope.get("rope_theta") or llama.get("rope_theta") or 1e4),
        eps=float(llama.get("rms_norm_eps", 1e-6)),
        window=int(llama["sliding_window"]) if sliding else None,
        silu=llama.get("hidden_act", "silu") == "silu",
        **{flag: _flag(config, flag, speculators) for flag in FLAGS},
    )


def _refuse_others(config: dict[str, Any], llama: dict[str, Any], target_layers: int) -> None:
    kind = config.get("speculators_model_type", "eagle3")
    layers, activation = llama.get("num_hidden_layers", 1), llama.get("hidden_act", "silu")
    checks = {
        f"a {kind} speculator": kind != "eagle3",
        f"of model_type {llama.get('model_type')}": llama.get("model_type", "llama") != "llama",
        f"of {layers} layers": layers not in (1, target_layers),  # NeMo writes the target's
        f"activated by {activation}": activation not in ACTIVATIONS,
        "with attention biases": bool(llama.get("attention_bias")),
        "with an embedding of its own": bool(config.get("embed_requires_grad")),
    }
    wrong = [what for what, is_wrong in checks.items() if is_wrong]
    if wrong:
        raise UserError(
            f"this head is {', '.join(wrong)}: only EAGLE-3 heads with one Llama layer that "
            "share the target's embedding are supported"
        )


def _flag(config: dict[str, Any], name: str, speculators: bool) -> bool:
    nested = config.get("eagle_config") or {}
    if speculators and name == "norm_before_residual" and name not in config:
        raise UserError(
            "the head's config.json lacks norm_before_residual, for which vLLM and speculators "
            'have different defaults: add "norm_before_residual": true or false'
        )
    return bool(config.get(name, nested.get(name, False)))


def _layers(config: dict[str, Any], target_layers: int) -> tuple[int, ...]:
    """By their output, whichever numbering the file uses (see module)."""
    by_output = (config.get("eagle_config") or {}).get(LAYER_IDS)
    by_input = config.get(LAYER_IDS)
    if by_input is not None:
        from_input = tuple(int(i) - 1 for i in by_input)
        if by_output is not None and tuple(by_output) != from_input:
            raise UserError(
                f"the head's config.json contradicts itself: {LAYER_IDS} is {by_input} (layers by "
                f"input) and {list(by_output)} in eagle_config (by output, one less): correct one"
            )
        return from_input
    return default_layers(target_layers) if by_output is None else tuple(map(int, by_output))
