"""Reads a Gemma 4 checkpoint's config.json into one `LayerSpec` per layer. No backend in here.

Unknown keys are ignored; keys that change results are checked strictly. Names and rules are those
of transformers 5.23, `models/gemma4`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec.core.errors import UserError

TEXT_TYPES = ("gemma4_text", "gemma4_unified_text")
MULTIMODAL_TYPES = ("gemma4", "gemma4_unified")
MOST_PADDING = 1024
"""Ids by which a vocabulary may be larger than its tokenizer's."""
PADDED_TO = 8
"""Padded vocabularies are multiples of this, most of 64."""
GLOBAL_HEAD_DIM = 512
"""head_dim of global layers if the config has none, as in transformers."""


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of one layer kind: `rotated` of head_dim / 2 pairs (i, i + head_dim / 2)
    turn by theta ** (-2 i / head_dim); the others stand still ("proportional")."""

    theta: float
    rotated: int
    factor: float = 1.0


@dataclass(frozen=True)
class MoeSpec:
    experts: int
    top_k: int
    width: int


@dataclass(frozen=True)
class LayerSpec:
    """Everything that makes one decoder layer differ from another."""

    window: int | None
    """Keys visible to a query, itself included; None on global layers."""
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    k_eq_v: bool
    """Values are the normalised raw keys: no v_proj tensor."""
    kv_from: int | None
    """The index of the layer with the K/V that this one attends to (KV sharing); None: its own."""
    ffw: int
    moe: MoeSpec | None
    normed: bool = True
    """Queries, keys and values are normed; else scores are scaled by head_dim ** -0.5 (Llama's
    layers, of which draft heads are made)."""
    raw_values: bool = field(default=False, repr=False)
    """Values are taken as they are, also where queries and keys are normed (Qwen3's layers)."""
    both_ways: bool = field(default=False, repr=False)
    """The tokens of a call see each other, not those before them alone (block drafters)."""
    whole_kv_heads: int | None = field(default=None, repr=False)
    """The model's, where this is one card's part of a layer."""

    @property
    def sliding(self) -> bool:
        return self.window is not None


@dataclass(frozen=True)
class Arch:
    """A Gemma 4 text decoder."""

    vocab: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    eps: float
    softcap: float | None
    per_layer_input: int
    """Width of per-layer inputs (E2B, E4B); 0 for none."""
    per_layer_vocab: int
    max_position: int
    silu: bool = False
    """Gates are SiLU, as Llama's, not tanh GELU."""
    pictures_both_ways: bool = field(default=False, repr=False)
    """On sliding layers the rows of a picture see each other; else they are causal, as text is. Not
    in identities: no bit of a text depends on it."""
    own_head: bool = False
    """Logits are made by a tensor `lm_head`, not by the embedding. Files decide: see
    `model_folder.read_arch`."""

    @property
    def head(self) -> str:
        """The name of the tensor that makes logits."""
        return "lm_head" if self.own_head else "embed_tokens"

    @property
    def moe(self) -> MoeSpec | None:
        """A mixture's experts, which all its layers have alike."""
        return next((layer.moe for layer in self.layers if layer.moe), None)


def fits_vocabulary(own: int, vocab: int) -> bool:
    """Whether a tokenizer's or a head's vocabulary is a model's, which trainers may have padded."""
    return own == vocab or (0 < vocab - own <= MOST_PADDING and vocab % PADDED_TO == 0)


def released(name: str) -> Arch:
    """A public model's dimensions without its weights, such as `gemma-4-31b` (speed, compiling)."""
    folder = Path(__file__).parent / "released"
    known = sorted(file.stem for file in folder.glob("*.json"))
    if name not in known:
        raise UserError(f"unknown architecture {name!r}: choose one of {', '.join(known)}")
    return parse_arch(json.loads((folder / f"{name}.json").read_text()))


def read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        raise UserError(f"no config.json in {path}: give a Hugging Face checkpoint folder")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as problem:  # not JSON, or not UTF-8
        raise UserError(f"{file} is not valid JSON ({problem}): download it again") from None


def parse_arch(config: dict[str, Any]) -> Arch:
    """A config.json's dict, multimodal or text-only, to an `Arch`. Raises UserError."""
    try:
        return _parse(_text_config(config))
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as problem:
        raise UserError(
            f"config.json has a value that makes no sense ({type(problem).__name__}: {problem}): "
            "download it again"
        ) from None


def _parse(text: dict[str, Any]) -> Arch:
    kinds = _layer_types(text)
    count = len(kinds)
    shared = int(text.get("num_kv_shared_layers") or 0)
    if not 0 <= shared < count:
        raise UserError(f"num_kv_shared_layers is {shared} but the model has {count} layers")
    donors = {kind: i for i, kind in enumerate(kinds[: count - shared])}
    softcap = text.get("final_logit_softcapping")
    layers = []
    for i, kind in enumerate(kinds):
        donor = donors.get(kind) if i >= count - shared else None
        if i >= count - shared and donor is None:
            raise UserError(f"layer {i} shares K/V but no earlier {kind} layer has its own")
        layers.append(_layer(text, i, kind, donor))
    return Arch(
        vocab=int(_need(text, "vocab_size")),
        hidden=int(_need(text, "hidden_size")),
        layers=tuple(layers),
        eps=float(text.get("rms_norm_eps", 1e-6)),
        softcap=None if softcap is None else float(softcap),
        per_layer_input=int(text.get("hidden_size_per_layer_input") or 0),
        per_layer_vocab=int(text.get("vocab_size_per_layer_input") or 0),
        max_position=int(text.get("max_position_embeddings", 131072)),
        pictures_both_ways=text.get("use_bidirectional_attention") == "vision",
    )


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    kind = config.get("model_type")
    if kind in MULTIMODAL_TYPES and isinstance(config.get("text_config"), dict):
        text = config["text_config"]
    elif kind in TEXT_TYPES:
        text = config
    else:
        known = ", ".join((*MULTIMODAL_TYPES, *TEXT_TYPES))
        raise UserError(f"unknown model_type {kind!r}: specdec runs Gemma 4 ({known})")
    for key, only in (("hidden_activation", "gelu_pytorch_tanh"), ("attention_bias", False)):
        if text.get(key, only) != only:
            raise UserError(f"config.json has {key}={text[key]!r}: only {only!r} is supported")
    if text.get("use_bidirectional_attention") == "all":
        raise UserError("use_bidirectional_attention is all in config.json: it can't decode")
    if text.get("rope_scaling"):
        raise UserError(
            "config.json has rope_scaling, which Gemma 4 does not use (its rope_parameters are "
            "by layer type): save the checkpoint with transformers 5 or newer"
        )
    return text


def _need(text: dict[str, Any], key: str) -> Any:
    value = text.get(key)
    if value is None:
        raise UserError(f"config.json lacks {key}: this is not a complete Gemma 4 config")
    return value


def _layer_types(text: dict[str, Any]) -> list[str]:
    count = int(_need(text, "num_hidden_layers"))
    kinds = text.get("layer_types")
    if kinds is None:  # transformers' own default: every sixth layer global, and the last
        kinds = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(count)]
        kinds[-1] = "full_attention"
    if len(kinds) != count:
        raise UserError(f"layer_types names {len(kinds)} layers, num_hidden_layers is {count}")
    strange = set(kinds) - {"sliding_attention", "full_attention"}
    if strange:
        raise UserError(f"unknown layer_types {sorted(strange)}")
    if kinds[-1] != "full_attention":
        raise UserError("layer_types ends in a sliding layer: Gemma 4 needs a global one last")
    return list(kinds)


def _layer(text: dict[str, Any], i: int, kind: str, donor: int | None) -> LayerSpec:
    sliding = kind == "sliding_attention"
    # transformers >= 5.15 saves head sizes per layer, under zero-padded numbers
    overrides = {int(k): v for k, v in (text.get("per_layer_config") or {}).items()}
    own = overrides.get(i, {})
    k_eq_v = bool(text.get("attention_k_eq_v")) and not sliding
    kv_heads, head_dim = int(_need(text, "num_key_value_heads")), int(_need(text, "head_dim"))
    if not sliding:
        head_dim = int(text.get("global_head_dim") or GLOBAL_HEAD_DIM)
        if k_eq_v:
            kv_heads = int(text.get("num_global_key_value_heads") or kv_heads)
    kv_heads = int(own.get("num_key_value_heads", kv_heads))
    head_dim = int(own.get("head_dim", head_dim))
    heads = int(_need(text, "num_attention_heads"))
    if heads % kv_heads:
        raise UserError(f"layer {i}: {heads} query heads do not divide into {kv_heads} kv heads")
    wide = donor is not None and bool(text.get("use_double_wide_mlp"))
    return LayerSpec(
        window=int(_need(text, "sliding_window")) if sliding else None,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=_rope(text, kind, head_dim),
        k_eq_v=k_eq_v,
        kv_from=donor,
        ffw=int(_need(text, "intermediate_size")) * (2 if wide else 1),
        moe=_moe(text),
    )


def _rope(text: dict[str, Any], kind: str, head_dim: int) -> Rope:
    default = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
        },
    }
    parameters = (text.get("rope_parameters") or default).get(kind) or default[kind]
    rope_type = parameters.get("rope_type", "default")
    theta, factor = float(parameters["rope_theta"]), float(parameters.get("factor", 1.0))
    if rope_type == "default":
        return Rope(theta, head_dim // 2, factor)
    if rope_type == "proportional":
        share = float(parameters.get("partial_rotary_factor", 1.0))
        return Rope(theta, int(share * head_dim // 2), factor)
    raise UserError(f"rope_type {rope_type!r} is not one that Gemma 4 uses (default, proportional)")


def _moe(text: dict[str, Any]) -> MoeSpec | None:
    if not text.get("enable_moe_block"):
        return None
    return MoeSpec(
        experts=int(_need(text, "num_experts")),
        top_k=int(_need(text, "top_k_experts")),
        width=int(_need(text, "moe_intermediate_size")),
    )
