"""What a block drafter's head is: its dimensions, its tensors, its choosers. No framework here, and
no file format: DFlash, DFlash 2, DSpark and JetSpec heads are all this one spec.

A head reads the outputs of some of the target's layers at each accepted token, once, and keeps of
them the keys and values of its own layers. To draft it runs one block: slot 0 is fed the newest
token (the anchor), all others the mask token. The slots attend to the kept keys and to each other,
and all drafts come out of that one pass. A chooser then picks the tokens, left to right.

Layers are numbered by their *output*, as in `targets.jax.model.forward`. Mathematics: DFlash (arXiv
2602.06036), as z-lab's and speculators' own classes compute it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np

from specdec.core.errors import UserError
from targets.arch import Arch, Rope, fits_vocabulary

HEAD_DIM = 128
"""Values per attention head of z-lab's heads."""
KV_HEADS = 8
"""Of the same; they have about 1.5 times as many values in all heads as the target is wide."""
NOISE = 1_000_003
"""Random values that repeat: a prime, so that no two rows of a weight are the same."""
SIDES = 2
"""A convolution's kernels: of a sub-layer's input, and of its output."""
TAPS = 2
"""Slots that a convolution reads: its own, and the one before."""


@dataclass(frozen=True)
class BlockLayer:
    """Which keys a layer's queries see."""

    causal: bool
    """A slot sees the slots up to its own; else the whole block."""
    window: int | None
    """Keys visible to a query, itself included; None for all."""


@dataclass(frozen=True)
class Body:
    """The transformer of a head."""

    hidden: int
    """Its width, which is also the target's."""
    ffw: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    layers: tuple[BlockLayer, ...]
    eps: float = 1e-6
    gemma: bool = False
    """Gemma 4's global layers (four norms, a scalar, tanh GELU, values out of the keys, no 1 /
    sqrt(head_dim)), not Qwen3's (two norms, SiLU, values of their own)."""
    conv_group: int = 0
    """Channels that share a coefficient of the convolutions around each sub-layer (DFlash 2); 0:
    there are none."""

    @property
    def scale(self) -> float:
        """Of queries."""
        return 1.0 if self.gemma else self.head_dim**-0.5


@dataclass(frozen=True)
class PreviousToken:
    """Chooser of DSpark: a draft's logits and a bias by the token before it, of this rank."""

    rank: int
    confidence: bool = False
    """Whether the file also has a head that predicts the chance of acceptance."""
    confidence_reads_token: bool = True
    """That head reads the token before the draft too, not the slot's state alone."""


@dataclass(frozen=True)
class Selector:
    """Chooser of DFlash 2: among the best few words of each slot, by a score of this rank that
    depends on the token before."""

    rank: int
    candidates: int


@dataclass(frozen=True)
class BlockSpec:
    """One head; hashable, so that programs can be compiled for it."""

    body: Body
    taps: tuple[int, ...]
    """The target's layers from which it reads outputs, in the order of `fc`'s columns."""
    slots: int
    """Of a block. It is drafted whole whatever K is: a shorter one would have other drafts."""
    first: int
    """The first slot that predicts: 1 where the anchor's only conditions, 0 where it predicts
    too."""
    mask_id: int
    """The token that slots without a token are fed."""
    vocab: int
    """The target's."""
    draft_vocab: int
    max_position: int
    embedding_scale: float = 1.0
    """Factor of embedded tokens."""
    softcap: float | None = None
    """Of logits, before a chooser adds to them."""
    chooser: PreviousToken | Selector | None = None
    """None: each slot's best word, whatever the others are (DFlash)."""
    own_table: bool = False
    """The file brings the embeddings; else they are the target's."""
    own_head: bool = False
    """The file brings the matrix that makes logits; else it is the target's."""

    @property
    def features(self) -> int:
        """Width of the target's features per token."""
        return len(self.taps) * self.body.hidden

    @property
    def drafts(self) -> int:
        """Tokens that a block drafts."""
        return self.slots - self.first


class BlockHead(NamedTuple):
    """A head on the host. weights: numpy arrays by the names of `tensors`, as stored; target_ids
    [draft_vocab] int64, ascending: the target's id of each draft id, None where they are the
    same."""

    spec: BlockSpec
    weights: dict[str, np.ndarray]
    target_ids: np.ndarray | None


def tensors(spec: BlockSpec) -> dict[str, tuple[int, ...]]:
    """Shape by name; linears are [out, in], and names are the files' without `.weight`."""
    body = spec.body
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (body.hidden, spec.features),
        "hidden_norm": (body.hidden,),
        "norm": (body.hidden,),
    }
    for i in range(len(body.layers)):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in _layer_tensors(body).items()}
    if spec.own_table:
        shapes["embed_tokens"] = (spec.vocab, body.hidden)
    if spec.own_head:
        shapes["lm_head"] = (spec.draft_vocab, body.hidden)
    return shapes | _chooser_tensors(spec)


def _layer_tensors(body: Body) -> dict[str, tuple[int, ...]]:
    wide, query, key = body.hidden, body.heads * body.head_dim, body.kv_heads * body.head_dim
    norms = ["input_layernorm", "post_attention_layernorm"]
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (query, wide),
        "self_attn.k_proj": (key, wide),
        "self_attn.o_proj": (wide, query),
        "self_attn.q_norm": (body.head_dim,),
        "self_attn.k_norm": (body.head_dim,),
        "mlp.gate_proj": (body.ffw, wide),
        "mlp.up_proj": (body.ffw, wide),
        "mlp.down_proj": (wide, body.ffw),
    }
    if body.gemma:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        shapes["layer_scalar"] = (1,)
    else:
        shapes["self_attn.v_proj"] = (key, wide)
    if body.conv_group:
        coefficients = SIDES * TAPS * wide // body.conv_group
        for conv in ("attention_conv", "mlp_conv"):
            shapes[f"{conv}.base_kernel"] = (SIDES, TAPS, wide)
            shapes[f"{conv}.kernel_projection"] = (coefficients, wide)
    return shapes | dict.fromkeys(norms, (wide,))


def _chooser_tensors(spec: BlockSpec) -> dict[str, tuple[int, ...]]:
    chooser, hidden = spec.chooser, spec.body.hidden
    if isinstance(chooser, Selector):
        return {
            "candidate_selector.predecessor_codebook": (spec.vocab, chooser.rank),
            "candidate_selector.successor_codebook": (spec.vocab, chooser.rank),
            "candidate_selector.hidden_projection": (chooser.rank, hidden),
        }
    if chooser is None:
        return {}
    shapes: dict[str, tuple[int, ...]] = {
        "markov_head.markov_w1": (spec.vocab, chooser.rank),
        "markov_head.markov_w2": (spec.draft_vocab, chooser.rank),
    }
    if chooser.confidence:
        read = hidden + chooser.rank if chooser.confidence_reads_token else hidden
        shapes |= {"confidence_head.proj": (1, read), "confidence_head.proj.bias": (1,)}
    return shapes


def check_spec(spec: BlockSpec) -> None:
    """Raise UserError for a head that could not run anywhere."""
    body, chooser = spec.body, spec.chooser
    if body.heads % body.kv_heads or body.head_dim % 2:
        raise UserError(
            f"{body.heads} heads, {body.kv_heads} kv heads, head_dim {body.head_dim}: kv heads "
            "must divide heads, and head_dim must be even"
        )
    if not spec.taps or len(set(spec.taps)) < len(spec.taps):
        raise UserError(f"feature layers must be one or more different ones, got {spec.taps}")
    if spec.drafts < 1 or spec.first not in (0, 1):
        raise UserError(f"a block of {spec.slots} slots has nothing to draft")
    if not 0 < spec.draft_vocab <= spec.vocab or not 0 <= spec.mask_id < spec.vocab:
        raise UserError(
            f"draft_vocab must be 1 to {spec.vocab} and mask_token_id a word below it, got "
            f"{spec.draft_vocab} and {spec.mask_id}"
        )
    if body.conv_group and body.hidden % body.conv_group:
        raise UserError(f"conv_group_size {body.conv_group} must divide the width {body.hidden}")
    if any(layer.window is not None and layer.window < spec.slots for layer in body.layers):
        raise UserError(f"a window must hold a block of {spec.slots} slots")
    if isinstance(chooser, Selector) and spec.draft_vocab < spec.vocab:
        raise UserError("a head with a candidate selector must score the whole vocabulary")
    if isinstance(chooser, Selector) and not 0 < chooser.candidates <= spec.vocab:
        raise UserError(f"selector_top_k must be 1 to {spec.vocab}, got {chooser.candidates}")


def check_pair(spec: BlockSpec, arch: Arch) -> None:
    """Raise UserError where a head was not made for this target."""
    use = "use the head that was trained for this model"
    if spec.body.hidden != arch.hidden:
        raise UserError(
            f"this block drafter is for a target of width {spec.body.hidden}, not {arch.hidden}: "
            f"{use}"
        )
    if not fits_vocabulary(spec.vocab, arch.vocab):
        raise UserError(
            f"this block drafter is for a vocabulary of {spec.vocab}, not {arch.vocab}: {use}"
        )
    if not 0 <= min(spec.taps) <= max(spec.taps) < len(arch.layers):
        raise UserError(
            f"this block drafter reads the outputs of layers {spec.taps}, but the target has "
            f"layers 0 to {len(arch.layers) - 1}: {use}"
        )


def sized(arch: Arch) -> BlockSpec:
    """A head such as z-lab's for a target of this size, to measure with."""
    kv_heads = KV_HEADS
    heads = kv_heads * max(1, round(3 * arch.hidden / (2 * HEAD_DIM * kv_heads)))
    window = BlockLayer(causal=True, window=2048)
    return BlockSpec(
        body=Body(
            hidden=arch.hidden,
            ffw=2 * arch.hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=HEAD_DIM,
            rope=Rope(1e6, HEAD_DIM // 2),
            layers=(window, window, window, window, BlockLayer(causal=False, window=None)),
        ),
        taps=spread_layers(len(arch.layers), 6),
        slots=16,
        first=1,
        mask_id=4,
        vocab=arch.vocab,
        draft_vocab=arch.vocab,
        max_position=arch.max_position,
        embedding_scale=arch.hidden**0.5,
        softcap=arch.softcap,
    )


def spread_layers(count: int, wanted: int) -> tuple[int, ...]:
    """Layers of a target with `count`, evenly from 1 to count - 3, as z-lab's lists are; fewer than
    `wanted` where the target is small."""
    last = max(1, count - 3)
    even = np.round(np.linspace(min(1, count - 1), last, min(wanted, last)))
    return tuple(int(layer) for layer in even)


def random_head(spec: BlockSpec, seed: int = 0) -> BlockHead:
    """Norms of 1, linears with std 1 / sqrt(in) in bfloat16, draft ids spread over the vocabulary;
    to measure with: values repeat themselves, as gigabytes of noise would take minutes."""
    noise = np.random.default_rng(seed).standard_normal(NOISE, np.float32)

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        scaled = (noise * np.float32(shape[-1] ** -0.5)).astype(ml_dtypes.bfloat16)
        return np.resize(scaled, shape)

    weights = {name: draw(shape) for name, shape in tensors(spec).items()}
    whole = spec.draft_vocab == spec.vocab
    ids = None if whole else np.arange(spec.draft_vocab) * spec.vocab // spec.draft_vocab
    return BlockHead(spec, weights, ids)
