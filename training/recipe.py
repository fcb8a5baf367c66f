"""How to train one head: a TOML file such as configs/eagle3-mini.toml."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import jax
import optax
from optax.contrib import MuonDimensionNumbers, muon
from pydantic import Field

from drafters.assistant.spec import AssistantSpec, sized
from drafters.dflash.spec import (
    BlockLayer,
    BlockSpec,
    Body,
    PreviousToken,
    check_pair as check_block_pair,
    check_spec as check_block,
)
from drafters.eagle3.spec import HeadSpec, check_pair, check_spec, default_layers
from specdec.core.errors import UserError
from specdec.core.toml import STRICT, read_recipe_as
from targets.arch import Arch, Rope
from training.optimizer import ADAM_LIKE_RMS

Loss = Literal["kl", "lk", "tv"]
RECIPES = Path(__file__).parent / "configs"
"""The recipes that come with specdec."""
EXAMPLE = "configs/eagle3-mini.toml"
ASSISTANT_EXAMPLE = "configs/assistant-mini-cpu.toml"
BLOCK_EXAMPLE = "configs/dspark-mini-cpu.toml"
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, lt=1)]
Rate = Annotated[float, Field(gt=0)]
HEADS = ("lm_head", "head", "markov_head.markov_w1", "markov_head.markov_w2")
"""Names of matrices with a row per word."""
MASK_ID = 4
"""Token that a block's other slots are fed: what all published heads for Gemma 4 are fed."""
THETA = 1e6
"""Of a block drafter's rotary positions."""
OrNone = Annotated[float, Field(ge=0)]
"""A rate, or 0 for none."""


@dataclass(frozen=True)
class HeadShape:
    """A head's free dimensions; the others are the target's. layers: by output, () for the default.
    window: the last tokens that it sees, 0 for all; served texts may be longer than rows. fc_norm,
    norm_output: as in EAGLE-3.1 (`HeadSpec`)."""

    ffw: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    draft_vocab: Count
    max_position: Count
    layers: tuple[int, ...] = ()
    window: Annotated[int, Field(ge=0)] = 0
    fc_norm: bool = False
    norm_output: bool = False
    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class AssistantShape:
    """What is free in an assistant; the rest is the target's. sliding: layers before the global
    one. It scores every word."""

    hidden: Count
    ffw: Count
    heads: Count
    sliding: Count = 3
    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class BlockShape:
    """What is free in a block drafter; the rest is the target's. slots: of a block, of which the
    first holds the anchor; rank: of the previous-token bias. window: the last tokens that each
    layer sees. Blocks are causal: a shorter draft is a beginning of a longer one. taps: by output,
    () for as many as the EAGLE-3 default. draft_vocab: 0 for the target's whole vocabulary.
    anchor_predicts: whether the anchor's slot makes the first draft, as DSpark's does by default;
    else it only carries the anchor."""

    ffw: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    layers: Count
    slots: Annotated[int, Field(ge=2, le=16)]
    rank: Count
    window: Count
    max_position: Count
    draft_vocab: Annotated[int, Field(ge=0)] = 0
    taps: tuple[int, ...] = ()
    anchor_predicts: bool = False
    __pydantic_config__ = STRICT

    @property
    def drafts(self) -> int:
        """Tokens that a block drafts."""
        return self.slots - (not self.anchor_predicts)


Shape = TypeVar("Shape", HeadShape, AssistantShape, BlockShape)


@dataclass(frozen=True)
class Rates:
    """Linear warm-up, then a cosine down to 0. AdamW without decay peaks at `learning_rate`; the
    layer's matrices follow Muon, which peaks at `muon`, or AdamW too where that is 0."""

    learning_rate: Rate
    warmup_steps: Annotated[int, Field(ge=0)]
    clip: Rate
    muon: OrNone = 0.0
    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class Recipe(Generic[Shape]):
    """`steps` steps of `batch` rows of `length` tokens; the head drafts `unroll` tokens from each.

    Draft step n weighs decay ** n. heldout_share of the answers, the last ones, are never trained
    on: they are what the head is judged by. live_prompts of their prompts are decoded through the
    engine at each evaluation, drafted by the head as it is.
    """

    seed: Annotated[int, Field(ge=0, lt=2**32)]
    steps: Count
    batch: Count
    length: Count
    unroll: Count
    decay: Annotated[float, Field(ge=0, le=1)]
    heldout_share: Share
    live_prompts: Count
    evaluate_every: Count
    save_every: Count
    head: Shape
    rates: Rates
    loss: Loss = "kl"
    """What is made small: the divergence from the target, its hybrid with lost acceptance, or lost
    acceptance with a tenth of the divergence, as block drafters are trained by others."""
    __pydantic_config__ = STRICT


def find_recipe(path: Path) -> Path:
    """The file that was named, or the recipe of that name that comes with specdec: a clone has them
    in `configs/`, an installed package has no such folder."""
    if path.parent in (Path(), Path("configs")) and not path.is_file():
        shipped = RECIPES / path.with_suffix(".toml").name
        return shipped if shipped.is_file() else path
    return path


def read_recipe(path: Path) -> Recipe[HeadShape]:
    """The recipe of an EAGLE-3 head. Raises UserError on a missing file, on unknown or missing keys
    and on impossible values."""
    path = find_recipe(path)
    return _checked(read_recipe_as(Recipe[HeadShape], path, EXAMPLE), path)


def read_assistant_recipe(path: Path) -> Recipe[AssistantShape]:
    """As `read_recipe`, for an assistant."""
    path = find_recipe(path)
    return _checked(read_recipe_as(Recipe[AssistantShape], path, ASSISTANT_EXAMPLE), path)


def read_block_recipe(path: Path) -> Recipe[BlockShape]:
    """As `read_recipe`, for a block drafter."""
    path = find_recipe(path)
    recipe = _checked(read_recipe_as(Recipe[BlockShape], path, BLOCK_EXAMPLE), path)
    shape = recipe.head
    if recipe.unroll != shape.drafts:
        drafts = "slots" if shape.anchor_predicts else f"slots - 1, which is {shape.drafts}"
        raise UserError(
            f"{path}: unroll {recipe.unroll} must be {drafts}: a block is trained whole"
        )
    return recipe


def _checked(recipe: Recipe[Shape], path: Path) -> Recipe[Shape]:
    if recipe.length <= recipe.unroll + 1:
        raise UserError(
            f"{path}: length {recipe.length} must exceed unroll + 1, which is {recipe.unroll + 1}"
        )
    return recipe


def spec_for(arch: Arch, shape: HeadShape, stop_ids: Collection[int]) -> HeadSpec:
    """The recipe's head for this target. Raises UserError where it can't be."""
    if shape.draft_vocab < len(stop_ids):
        raise UserError(f"draft_vocab {shape.draft_vocab} has no room for {len(stop_ids)} stop ids")
    sizes: dict[str, Any] = asdict(shape)
    sizes["layers"] = shape.layers or default_layers(len(arch.layers))
    sizes["window"] = shape.window or None
    spec = HeadSpec(hidden=arch.hidden, vocab=arch.vocab, **sizes)
    check_spec(spec)
    check_pair(spec, arch)
    return spec


def assistant_for(arch: Arch, shape: AssistantShape) -> AssistantSpec:
    """The recipe's assistant for this target. Raises UserError where it can't be."""
    spec = sized(arch, shape.hidden, shape.ffw, shape.heads, shape.sliding)
    for layer in spec.arch.layers:
        if shape.heads % layer.kv_heads:
            raise UserError(
                f"heads is {shape.heads}, but the target has {layer.kv_heads} K/V heads, which "
                "must divide it"
            )
    return spec


def block_for(arch: Arch, shape: BlockShape, stop_ids: Collection[int]) -> BlockSpec:
    """The recipe's block drafter for this target. Raises UserError where it can't be."""
    words = shape.draft_vocab or arch.vocab
    if words < len(stop_ids):
        raise UserError(f"draft_vocab {words} has no room for {len(stop_ids)} stop ids")
    layer = BlockLayer(causal=True, window=shape.window)
    spec = BlockSpec(
        body=Body(
            hidden=arch.hidden,
            ffw=shape.ffw,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            rope=Rope(THETA, shape.head_dim // 2),
            layers=(layer,) * shape.layers,
        ),
        taps=shape.taps or default_layers(len(arch.layers)),
        slots=shape.slots,
        first=0 if shape.anchor_predicts else 1,
        mask_id=MASK_ID,
        vocab=arch.vocab,
        draft_vocab=words,
        max_position=shape.max_position,
        chooser=PreviousToken(shape.rank),
        own_head=words < arch.vocab or arch.own_head,
    )
    check_block(spec)
    check_block_pair(spec, arch)
    return spec


def any_spec_for(
    arch: Arch, shape: HeadShape | AssistantShape | BlockShape, stop_ids: Collection[int]
) -> HeadSpec | AssistantSpec | BlockSpec:
    """The spec of any kind. Raises UserError if there is none."""
    if isinstance(shape, AssistantShape):
        return assistant_for(arch, shape)
    if isinstance(shape, BlockShape):
        return block_for(arch, shape, stop_ids)
    return spec_for(arch, shape, stop_ids)


def make_optimizer(recipe: Recipe[Any]) -> optax.GradientTransformation:
    rates = recipe.rates
    rule = optax.adamw(_schedule(recipe, rates.learning_rate), 0.9, 0.95, weight_decay=0.0)
    if rates.muon:
        rule = muon(
            _schedule(recipe, rates.muon),
            adam_b2=0.95,
            adam_learning_rate=_schedule(recipe, rates.learning_rate),
            muon_weight_dimension_numbers=_matrix_axes,
            consistent_rms=ADAM_LIKE_RMS,
        )
    return optax.chain(optax.clip_by_global_norm(rates.clip), rule)


def _schedule(recipe: Recipe[Any], peak: float) -> optax.Schedule:
    warmup = recipe.rates.warmup_steps
    return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, max(recipe.steps, warmup + 1))


def _matrix_axes(weights: Any) -> Any:
    """The layer's matrices [out, in]; norms and the rows of the head go to AdamW."""

    def axes(path: Any, value: Any) -> MuonDimensionNumbers | None:
        return MuonDimensionNumbers(1, 0) if value.ndim == 2 and path[-1].key not in HEADS else None

    return jax.tree_util.tree_map_with_path(axes, weights)
