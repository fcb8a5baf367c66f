"""Small random block drafters for the tiny models, in each dialect's files; what a config.json
means is written down beside it, not computed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from drafters.dflash.spec import (
    BlockHead,
    BlockLayer,
    BlockSpec,
    Body,
    PreviousToken,
    Selector,
    tensors,
)
from targets.arch import Arch, Rope

WINDOW = 12
WORDS = 200
"""Of the pruned heads."""
CAUSAL = BlockLayer(causal=True, window=WINDOW)
BOTH_WAYS = BlockLayer(causal=False, window=WINDOW)
FULL = BlockLayer(causal=False, window=None)
KINDS = {True: "sliding_attention", False: "full_attention"}

_BODY: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "attention_bias": False,
    "sliding_window": WINDOW,
    "use_sliding_window": True,
}
_SPEC = BlockSpec(
    body=Body(
        hidden=48,
        ffw=40,
        heads=4,
        kv_heads=2,
        head_dim=12,
        rope=Rope(1e4, 6),
        layers=(CAUSAL, CAUSAL, FULL),
    ),
    taps=(0, 2, 4),
    slots=6,
    first=1,
    mask_id=4,
    vocab=320,
    draft_vocab=320,
    max_position=512,
)


def _body(**changes: Any) -> Body:
    return replace(_SPEC.body, **changes)


def _layers(*sliding: bool) -> dict[str, Any]:
    return {"num_hidden_layers": len(sliding), "layer_types": [KINDS[one] for one in sliding]}


def _nested(kind: str, *sliding: bool, **keys: Any) -> dict[str, Any]:
    """speculators' form: layers by their input."""
    inner = _BODY | _layers(*sliding)
    inner["rope_parameters"] = {"rope_theta": 10000.0, "rope_type": "default"}
    return {
        "speculators_model_type": kind,
        "speculators_config": {"algorithm": kind},
        "aux_hidden_state_layer_ids": [1, 3, 5],
        "block_size": 6,
        "mask_token_id": 4,
        "draft_vocab_size": 320,
        "transformer_layer_config": inner,
    } | keys


def _flat(*sliding: bool, **keys: Any) -> dict[str, Any]:
    """z-lab's form: layers by their output."""
    own = {"mask_token_id": 4, "target_layer_ids": [0, 2, 4]} | keys
    rest = {"block_size": 8, "final_logit_softcapping": 30.0, "rope_theta": 1000000}
    return _BODY | _layers(*sliding) | rest | {"dflash_config": own}


_ZLAB = replace(
    _SPEC,
    body=_body(rope=Rope(1e6, 6)),
    slots=8,
    embedding_scale=48**0.5,
    softcap=30.0,
)
_DEEPSPEC: dict[str, Any] = {
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_unified_text",
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_k_eq_v": True,
    "rms_norm_eps": 1e-6,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
            "rope_type": "proportional",
        }
    },
    "final_logit_softcapping": 30.0,
    "target_layer_ids": [0, 2, 4],
    "block_size": 5,
    "mask_token_id": 4,
    "markov_rank": 8,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "dflash": _nested("dflash", True, True, False, draft_vocab_size=WORDS),
    "dspark": _nested(
        "dspark", True, True, draft_vocab_size=WORDS, markov_rank=8, sample_from_anchor=False
    ),
    "dspark-anchor": _nested("dspark", False, False, markov_rank=8, enable_confidence_head=False),
    "dflash2": _nested(
        "dflash2", True, False, conv_group_size=8, selector_rank=8, selector_top_k=9
    ),
    "zlab": _flat(True, True, False),
    "jetspec": _flat(True, False, causal_head=True),
    "deepspec": _DEEPSPEC,
}
"""A config.json by form."""
SPECS: dict[str, BlockSpec] = {
    "dflash": replace(_SPEC, draft_vocab=WORDS, own_head=True),
    "dspark": replace(
        _SPEC,
        body=_body(layers=(CAUSAL, CAUSAL)),
        draft_vocab=WORDS,
        own_table=True,
        own_head=True,
        chooser=PreviousToken(8, confidence=True),
    ),
    "dspark-anchor": replace(
        _SPEC, body=_body(layers=(FULL, FULL)), first=0, chooser=PreviousToken(8)
    ),
    "dflash2": replace(
        _SPEC, body=_body(layers=(BOTH_WAYS, FULL), conv_group=8), chooser=Selector(8, 9)
    ),
    "zlab": _ZLAB,
    "jetspec": replace(
        _ZLAB,
        body=replace(_ZLAB.body, layers=(CAUSAL, BlockLayer(causal=True, window=None))),
    ),
    "deepspec": replace(
        _SPEC,
        body=_body(kv_heads=1, head_dim=16, rope=Rope(1e6, 2), layers=(FULL, FULL), gemma=True),
        slots=5,
        first=0,
        embedding_scale=48**0.5,
        softcap=30.0,
        own_table=True,
        own_head=True,
        chooser=PreviousToken(8, confidence=True),
    ),
}
"""What each means, with the tables that its file brings."""
FORMS = list(SPECS)


def random_block(spec: BlockSpec) -> BlockHead:
    """Norm weights that aren't 1, linears that keep the scale."""
    random, weights = np.random.default_rng(1), {}
    for name, shape in tensors(spec).items():
        noise = random.standard_normal(shape).astype(np.float32)
        scalars = len(shape) == 1 or name.endswith("base_kernel")
        weights[name] = 1 + 0.2 * noise if scalars else noise * shape[-1] ** -0.5
    ids = None
    if spec.draft_vocab < spec.vocab:
        ids = np.sort(random.choice(spec.vocab, spec.draft_vocab, replace=False))
    return BlockHead(spec, weights, ids)


def save(head: BlockHead, config: dict[str, Any], out: Path, **more: np.ndarray) -> None:
    """A folder as a publisher makes it."""
    whole = ("_kernel", "_codebook", "layer_scalar", ".bias")
    stored = {n if n.endswith(whole) else f"{n}.weight": w for n, w in head.weights.items()}
    if head.target_ids is not None:
        stored["d2t"] = head.target_ids.astype(np.int64) - np.arange(len(head.target_ids))
        stored["t2d"] = np.isin(np.arange(head.spec.vocab), head.target_ids)
    save_file(stored | more, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config))


def grown(spec: BlockSpec, hidden: int, vocab: int, taps: tuple[int, ...]) -> BlockSpec:
    """The same for a larger target, with the same words where it is pruned."""
    scale = hidden**0.5 if spec.embedding_scale > 1 else 1.0
    whole = spec.draft_vocab == spec.vocab
    return replace(
        spec,
        body=replace(spec.body, hidden=hidden),
        taps=taps,
        vocab=vocab,
        draft_vocab=vocab if whole else spec.draft_vocab,
        embedding_scale=scale,
    )


def block_for(
    arch: Arch, taps: tuple[int, ...], form: str, head_dim: int | None = None
) -> BlockHead:
    """A random one for any target. head_dim: in place of the form's."""
    spec = grown(SPECS[form], arch.hidden, arch.vocab, taps)
    if head_dim is not None and head_dim != spec.body.head_dim:
        rope = replace(spec.body.rope, rotated=head_dim // 2)
        spec = replace(spec, body=replace(spec.body, head_dim=head_dim, rope=rope))
    return random_block(spec)


def grown_config(form: str, hidden: int, vocab: int, taps: tuple[int, ...]) -> dict[str, Any]:
    """The config.json of a nested form's `grown` head."""
    config = CONFIGS[form]
    inner = config["transformer_layer_config"] | {"hidden_size": hidden, "vocab_size": vocab}
    by_input = [layer + 1 for layer in taps]
    words = config["draft_vocab_size"]
    words = words if words < config["transformer_layer_config"]["vocab_size"] else vocab
    keys = {"aux_hidden_state_layer_ids": by_input, "draft_vocab_size": words}
    return config | keys | {"transformer_layer_config": inner}
