"""A checkpoint's image side, read from its config.json and processor_config.json: which encoder it
has, how pictures are cut, and which ids stand around them. `vision_config` decides, never a size's
name. No backend in here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdec.core.errors import UserError
from targets.arch import read_config
from targets.json_files import read_object
from targets.shards import has_weights, tensors_of
from targets.vision.preprocessing import Patches

BUDGETS = (70, 140, 280, 560, 1120)
"""Soft tokens that a picture may take at most."""
USUAL = 280
"""The budget of a checkpoint that names none."""
LOW = 70
"""The budget for `detail: low`."""
PROJECTOR = "embed_vision.embedding_projection.weight"
"""The end of a tensor's name, in each kind of checkpoint with an image side."""
LAYER_NORM_EPS = 1e-5
"""Of the encoder-free form's norms, whatever rms_norm_eps is: torch's default."""
ROPES = ("default", "axial")
"""Two names of the tower's rotary embedding."""
TOWER_DEFAULTS = {
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "head_dim": 64,
    "position_embedding_size": 10_240,
}
"""What a tower's `vision_config` need not say (transformers' `Gemma4VisionConfig`)."""
RESAMPLE_BICUBIC = 3
"""Pillow's number of bicubic resizing."""


@dataclass(frozen=True)
class TowerSpec:
    """A transformer over patches. It has as many key and value heads as query heads."""

    layers: int
    ffw: int
    heads: int
    head_dim: int
    theta: float
    clipped: bool
    """Each linear layer's inputs and outputs are clamped to bounds that the files have."""
    standardised: bool
    """Pooled rows are standardised by two stored vectors."""


@dataclass(frozen=True)
class PictureIds:
    """The ids around a picture (boi, eoi), and the one that a chat template writes for it."""

    begin: int
    image: int
    end: int


@dataclass(frozen=True)
class VisionSpec:
    """How a checkpoint sees."""

    patches: Patches
    width: int
    """Hidden size of the encoder, D."""
    places: int
    """Positions along each axis that the table has."""
    eps: float
    tower: TowerSpec | None
    """None: encoder-free, a patch becomes a row by a linear layer (12B)."""
    ids: PictureIds
    usual: int
    """The checkpoint's own budget of soft tokens."""
    budget: int
    """The largest budget that requests may have."""

    @property
    def patch_values(self) -> int:
        """Values of a patch."""
        return 3 * self.patches.side**2

    @property
    def most_patches(self) -> int:
        """Of the largest picture."""
        return self.budget * self.patches.pool**2

    def budget_for(self, detail: str) -> int:
        """Soft tokens for OpenAI's `detail`: low, high, or anything else for the usual number."""
        wish = {"low": LOW, "high": self.budget}.get(detail, self.usual)
        return min(wish, self.budget)

    def padded(self, tokens: int) -> int:
        """The smallest budget that holds so many soft tokens: a picture is encoded at its shape."""
        return next(size for size in (*BUDGETS, self.budget) if size >= tokens)


def read_vision(path: Path, budget: int | None = None) -> VisionSpec | None:
    """The image side of a checkpoint folder; None where config.json or the files have none. budget:
    soft tokens that a picture may take, by default the checkpoint's. Raises UserError."""
    config = read_config(path)
    if not isinstance(config.get("vision_config"), dict) or not config["vision_config"]:
        return None
    if not has_weights(path) or not any(name.endswith(PROJECTOR) for name in tensors_of(path)):
        return None
    processor = read_object(path / "processor_config.json").get("image_processor") or {}
    try:
        spec = _parse(config, config["vision_config"], processor)
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise UserError(
            f"vision_config in config.json makes no sense ({type(problem).__name__}: {problem}): "
            "download it again, or leave its images off (--images off)"
        ) from None
    return _with_budget(spec, spec.usual if budget is None else budget)


def _with_budget(spec: VisionSpec, budget: int) -> VisionSpec:
    if budget not in BUDGETS:
        raise UserError(f"--image-tokens must be one of {_listed()}, got {budget}")
    if budget * spec.patches.pool > spec.places:
        raise UserError(
            f"--image-tokens {budget} needs {budget * spec.patches.pool} positions, this model's "
            f"table has {spec.places}"
        )
    return replace(spec, budget=budget)


def _listed() -> str:
    return ", ".join(map(str, BUDGETS))


def _parse(config: dict[str, Any], vision: dict[str, Any], processor: dict[str, Any]) -> VisionSpec:
    _check_processor(processor)
    free = "mm_embed_dim" in vision
    vision = vision if free else TOWER_DEFAULTS | vision
    side, pool = int(vision["patch_size"]), int(vision["pooling_kernel_size"])
    named = (
        processor.get("max_soft_tokens"),
        vision.get("num_soft_tokens"),
        vision.get("default_output_length"),
        config.get("vision_soft_tokens_per_image"),
    )
    usual = int(next((value for value in named if value), USUAL))
    if usual not in BUDGETS:
        raise UserError(f"max_soft_tokens must be one of {_listed()}, the files have {usual}")
    ids = (int(config[f"{name}_token_id"]) for name in ("boi", "image", "eoi"))
    return VisionSpec(
        Patches(side * pool, 1) if free else Patches(side, pool),
        int(vision["mm_embed_dim" if free else "hidden_size"]),
        int(vision["mm_posemb_size" if free else "position_embedding_size"]),
        float(vision.get("rms_norm_eps", 1e-6)),
        None if free else _tower(vision),
        PictureIds(*ids),
        usual,
        usual,
    )


def _check_processor(processor: dict[str, Any]) -> None:
    """Raises UserError for another preprocessing than Gemma's. A `size` is ignored: conversions add
    one, and nothing reads it."""
    normal = processor.get("do_normalize") and (
        any(processor.get("image_mean") or ()) or set(processor.get("image_std") or (1,)) != {1}
    )
    if normal or processor.get("resample", RESAMPLE_BICUBIC) != RESAMPLE_BICUBIC:
        raise UserError(
            "processor_config.json normalises pictures or resizes them otherwise than Gemma's: "
            "take the released file, or leave images off (--images off)"
        )


def _tower(vision: dict[str, Any]) -> TowerSpec:
    rope = vision.get("rope_parameters") or {}
    heads = int(vision["num_attention_heads"])
    strange = (
        rope.get("rope_type", "default") not in ROPES
        or int(vision.get("num_key_value_heads") or heads) != heads
        or vision.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh"
        or vision.get("attention_bias", False)
    )
    if strange:
        raise UserError(
            "vision_config has a rope, an activation, biases or shared heads that Gemma's tower "
            "has not: leave its images off (--images off)"
        )
    return TowerSpec(
        int(vision["num_hidden_layers"]),
        int(vision["intermediate_size"]),
        heads,
        int(vision["head_dim"]),
        float(rope.get("rope_theta", 100.0)),
        bool(vision.get("use_clipped_linears")),
        bool(vision.get("standardize")),
    )
