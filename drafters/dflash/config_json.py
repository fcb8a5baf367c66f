"""A block drafter's config.json, in its three dialects, as one spec: speculators (nested; RedHat,
rasyosef), flat (z-lab and JetSpec) and DeepSpec (a Gemma 4 text config with keys of its own).

They differ in what costs acceptance and no exactness, so that only references show a mistake:

- speculators numbers layers by their input, the others by their output.
- Whether the anchor's slot predicts: speculators' default depends on the type, DeepSpec's always
  does, z-lab's never.
- Embeddings are scaled by sqrt(width) and logits soft-capped in z-lab's and DeepSpec's heads.
- Sliding layers are causal within the block, and full ones not, unless a file says otherwise.

A key that is neither read nor known to mean nothing here is refused by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from drafters.dflash.spec import BlockLayer, BlockSpec, Body, PreviousToken, Selector
from specdec.core.errors import UserError
from targets.arch import Rope

FULL = "full_attention"
SLIDING = "sliding_attention"
NOTHING_HERE = frozenset(
    """
    architectures auto_map bos_token_id dtype eos_token_id initializer_range max_window_layers
    model_type pad_token_id torch_dtype transformers_version use_cache attention_dropout
    pretraining_tp tie_word_embeddings _name_or_path quantization_config compression_config
    """.split()
)
"""Keys that change nothing of a draft: tokens of the target's tokenizer, training, bookkeeping, and
how weights are stored, which `files.py` reads."""
BODY = frozenset(
    """
    hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    hidden_act rms_norm_eps vocab_size max_position_embeddings attention_bias mlp_bias layer_types
    sliding_window use_sliding_window rope_theta rope_scaling rope_parameters
    """.split()
)
SPECULATORS = frozenset(
    """
    aux_hidden_state_layer_ids block_size draft_vocab_size mask_token_id sample_from_anchor
    sliding_window_non_causal target_hidden_size speculators_model_type speculators_version
    speculators_config transformer_layer_config markov_rank markov_head_type enable_confidence_head
    confidence_head_with_markov conv_kernel_size conv_group_size selector_rank selector_top_k
    """.split()
)
FLAT = frozenset(
    "block_size dflash_config num_target_layers final_logit_softcapping layer_types".split()
)
FLAT_OWN = frozenset(
    "block_size mask_token_id target_layer_ids causal causal_head use_swa swa_window_size".split()
)
"""Keys of a flat file's `dflash_config`."""
DEEPSPEC = frozenset(
    """
    target_layer_ids block_size mask_token_id markov_rank markov_head_type enable_confidence_head
    confidence_head_with_markov num_anchors num_target_layers target_model_type
    target_text_model_type hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads num_global_key_value_heads head_dim global_head_dim hidden_activation
    rms_norm_eps vocab_size max_position_embeddings attention_bias attention_k_eq_v layer_types
    sliding_window rope_parameters final_logit_softcapping enable_moe_block moe_intermediate_size
    num_experts top_k_experts hidden_size_per_layer_input vocab_size_per_layer_input
    num_kv_shared_layers use_bidirectional_attention use_double_wide_mlp
    """.split()
)
KINDS = ("dflash", "dflash2", "dspark")
"""Types of speculators that are block drafters; `xpress` iterates, and is another method."""
MARKOV = "vanilla"
"""The form of the previous-token bias that all heads for Gemma 4 have."""


def parse_config(config: Mapping[str, Any]) -> BlockSpec:
    """Any dialect to a spec, as the config alone tells: without embeddings and a head of its own,
    which the files decide. Raises UserError for what such a head can't be."""
    try:
        return _reader(config)(config)
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise UserError(
            f"the head's config.json lacks or misstates something ({type(problem).__name__}: "
            f"{problem}): download it again"
        ) from None


def dspark_config(
    spec: BlockSpec, stop_ids: tuple[int, ...], verifier: str, dtype: str
) -> dict[str, Any]:
    """The config.json of a causal head with a previous-token bias, in speculators' form."""
    chooser, body = spec.chooser, spec.body
    assert isinstance(chooser, PreviousToken) and all(layer.causal for layer in body.layers)
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": spec.drafts,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "speculators_version": "0.9.0",
        "aux_hidden_state_layer_ids": [layer + 1 for layer in spec.taps],
        "block_size": spec.slots,
        "draft_vocab_size": spec.draft_vocab,
        "mask_token_id": spec.mask_id,
        "sample_from_anchor": spec.first == 0,
        "sliding_window_non_causal": False,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "markov_rank": chooser.rank,
        "markov_head_type": MARKOV,
        "enable_confidence_head": chooser.confidence,
        "confidence_head_with_markov": chooser.confidence_reads_token,
        "dtype": dtype,
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": ["Gemma4ForCausalLM"]},
        },
        "transformer_layer_config": _inner_config(spec, stop_ids),
    }


def _inner_config(spec: BlockSpec, stop_ids: tuple[int, ...]) -> dict[str, Any]:
    body = spec.body
    windows = {layer.window for layer in body.layers}
    assert len(windows) == 1 and None not in windows, "all layers slide alike"
    return {
        "model_type": "qwen3",
        "hidden_size": body.hidden,
        "intermediate_size": body.ffw,
        "num_hidden_layers": len(body.layers),
        "num_attention_heads": body.heads,
        "num_key_value_heads": body.kv_heads,
        "head_dim": body.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": body.eps,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.max_position,
        "layer_types": [SLIDING] * len(body.layers),
        "sliding_window": windows.pop(),
        "use_sliding_window": True,
        "max_window_layers": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": body.rope.theta},
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 2,
        "pad_token_id": 0,
        "eos_token_id": list(stop_ids),
    }


def _reader(config: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], BlockSpec]:
    if "speculators_model_type" in config:
        return _speculators
    if "dflash_config" in config:
        return _flat
    names = " ".join(config.get("architectures") or ())
    if names.startswith("Gemma4D"):
        return _deepspec
    raise UserError(
        f"this is no block drafter's config.json (architectures: {names or 'none'}): it has "
        "neither speculators_model_type nor dflash_config, and is not DeepSpec's for Gemma 4"
    )


def _speculators(config: Mapping[str, Any]) -> BlockSpec:
    _refuse_unknown(config, SPECULATORS, "config.json")
    kind, inner = config["speculators_model_type"], config["transformer_layer_config"]
    _refuse_unknown(inner, BODY, "transformer_layer_config")
    _expect("speculators_model_type", kind, KINDS)
    _expect("target_hidden_size", config.get("target_hidden_size"), (None, inner["hidden_size"]))
    anchor = config.get("sample_from_anchor", kind == "dspark")
    two_ways = config.get("sliding_window_non_causal", kind == "dflash2")
    layers = _layers(inner, lambda sliding: sliding and not two_ways)
    chooser, group = None, 0
    if kind == "dspark":
        chooser = _previous_token(config, default_rank=256)
    if kind == "dflash2":
        _expect("conv_kernel_size", config.get("conv_kernel_size", 2), (2,))
        group = int(config.get("conv_group_size", 16))
        chooser = Selector(
            int(config.get("selector_rank", 256)), int(config.get("selector_top_k", 16))
        )
    return BlockSpec(
        body=_qwen3(inner, layers, group),
        taps=tuple(int(i) - 1 for i in config["aux_hidden_state_layer_ids"]),
        slots=int(config["block_size"]),
        first=0 if anchor else 1,
        mask_id=int(config["mask_token_id"]),
        vocab=int(inner["vocab_size"]),
        draft_vocab=int(config.get("draft_vocab_size") or inner["vocab_size"]),
        max_position=int(inner["max_position_embeddings"]),
        chooser=chooser,
    )


def _flat(config: Mapping[str, Any]) -> BlockSpec:
    _refuse_unknown(config, FLAT | BODY, "config.json")
    own = config["dflash_config"]
    _refuse_unknown(own, FLAT_OWN, "dflash_config")
    body = dict(config)
    if own.get("use_swa"):
        body["sliding_window"] = own["swa_window_size"]
    causal = own.get("causal_head", own.get("causal"))
    layers = _layers(body, lambda sliding: sliding if causal is None else bool(causal))
    cap, hidden = config.get("final_logit_softcapping"), int(config["hidden_size"])
    return BlockSpec(
        body=_qwen3(body, layers, 0),
        taps=tuple(int(i) for i in own["target_layer_ids"]),
        slots=int(own["block_size"] if "block_size" in own else config["block_size"]),
        first=1,
        mask_id=int(own["mask_token_id"]),
        vocab=int(config["vocab_size"]),
        draft_vocab=int(config["vocab_size"]),
        max_position=int(config["max_position_embeddings"]),
        embedding_scale=hidden**0.5,
        softcap=None if cap is None else float(cap),
    )


def _deepspec(config: Mapping[str, Any]) -> BlockSpec:
    _refuse_unknown(config, DEEPSPEC, "config.json")
    only = {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attention_k_eq_v": True,
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
    }
    for key, value in only.items():
        found = config.get(key)
        _expect(key, value if found is None else found, (value,))
    kinds = config["layer_types"]
    _expect("layer_types", sorted(set(kinds)), ([FULL],))
    _expect("num_hidden_layers", config["num_hidden_layers"], (len(kinds),))
    rope = config["rope_parameters"][FULL]
    _expect("rope_type", rope["rope_type"], ("proportional",))
    dim = int(config["global_head_dim"])
    hidden, cap = int(config["hidden_size"]), config.get("final_logit_softcapping")
    spark = "DSpark" in config["architectures"][0]
    kv_heads = config.get("num_global_key_value_heads") or config["num_key_value_heads"]
    return BlockSpec(
        body=Body(
            hidden=hidden,
            ffw=int(config["intermediate_size"]),
            heads=int(config["num_attention_heads"]),
            kv_heads=int(kv_heads),
            head_dim=dim,
            rope=Rope(
                float(rope["rope_theta"]), int(rope.get("partial_rotary_factor", 1.0) * dim // 2)
            ),
            layers=(BlockLayer(causal=False, window=None),) * len(kinds),
            eps=float(config.get("rms_norm_eps", 1e-6)),
            gemma=True,
        ),
        taps=tuple(int(i) for i in config["target_layer_ids"]),
        slots=int(config["block_size"]),
        first=0,
        mask_id=int(config["mask_token_id"]),
        vocab=int(config["vocab_size"]),
        draft_vocab=int(config["vocab_size"]),
        max_position=int(config["max_position_embeddings"]),
        embedding_scale=hidden**0.5,
        softcap=None if cap is None else float(cap),
        chooser=_previous_token(config, default_rank=0) if spark else None,
    )


def _qwen3(config: Mapping[str, Any], layers: tuple[BlockLayer, ...], conv_group: int) -> Body:
    """A body of Qwen3's layers; `llama` as its model_type names the same ones."""
    _expect("model_type", config.get("model_type", "qwen3"), ("qwen3", "llama"))
    _expect("hidden_act", config.get("hidden_act", "silu"), ("silu",))
    for key in ("attention_bias", "mlp_bias"):
        _expect(key, bool(config.get(key)), (False,))
    rope = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    _expect("rope_type", rope.get("rope_type", rope.get("type", "default")), ("default",))
    theta = rope.get("rope_theta") or config.get("rope_theta")
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    dim = int(config.get("head_dim") or hidden // heads)
    return Body(
        hidden=hidden,
        ffw=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=dim,
        rope=Rope(float(theta or 1e4), dim // 2),
        layers=layers,
        eps=float(config.get("rms_norm_eps", 1e-6)),
        conv_group=conv_group,
    )


def _layers(config: Mapping[str, Any], causal: Callable[[bool], bool]) -> tuple[BlockLayer, ...]:
    """causal: of a layer that is sliding or not -> whether it is causal within the block."""
    count = int(config["num_hidden_layers"])
    kinds = config.get("layer_types") or [FULL] * count
    _expect("num_hidden_layers", count, (len(kinds),))
    for kind in kinds:
        _expect("layer_types", kind, (FULL, SLIDING))
    if SLIDING in kinds:
        _expect("use_sliding_window", config.get("use_sliding_window", True), (True,))
    return tuple(
        BlockLayer(
            causal(kind == SLIDING), int(config["sliding_window"]) if kind == SLIDING else None
        )
        for kind in kinds
    )


def _previous_token(config: Mapping[str, Any], default_rank: int) -> PreviousToken | None:
    rank = int(config.get("markov_rank", default_rank))
    confidence = bool(config.get("enable_confidence_head", True))
    if not rank:
        if confidence:
            raise UserError("the head has a confidence head but no previous-token bias")
        return None
    _expect("markov_head_type", config.get("markov_head_type", MARKOV), (MARKOV,))
    return PreviousToken(rank, confidence, bool(config.get("confidence_head_with_markov", True)))


def _refuse_unknown(config: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    strange = sorted(config.keys() - known - NOTHING_HERE)
    if strange:
        raise UserError(
            f"the head's {where} has {', '.join(strange)}, which specdec does not know: drafts "
            "would be made in another way than the head was trained for"
        )


def _expect(key: str, value: Any, supported: tuple[Any, ...]) -> None:
    if value not in supported:
        listed = " or ".join(str(one) for one in supported)
        raise UserError(f"the head's config.json has {key} {value}: only {listed} is supported")
