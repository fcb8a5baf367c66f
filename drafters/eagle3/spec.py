"""What an EAGLE-3 head is: its dimensions, its tensors, its draft vocabulary. No framework here.

Layers are numbered by their *output*: feature layer L is the residual stream after layer L. That is
what `targets.jax.model.forward` captures, SpecForge and SGLang write, and vLLM calls L + 1.
Mathematics: EAGLE-3 (arXiv 2503.01840), as vLLM's `llama_eagle3.py` computes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specdec.core.errors import UserError
from targets.arch import Arch, fits_vocabulary

HEAD_DIM = 128
"""Usual values per attention head of published heads."""
DRAFT_VOCAB = 32_000
"""Usual number of tokens that published heads score."""
NOISE = 1_000_003
"""Random values that repeat: a prime, so that no two rows of a weight are the same."""


@dataclass(frozen=True)
class HeadSpec:
    """One head's dimensions; hashable, so that programs can be compiled for it."""

    hidden: int
    """Its width, which is also the target's: the target's embedding is shared as it is."""
    ffw: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    """The target's."""
    draft_vocab: int
    layers: tuple[int, ...]
    """The target's layers from which it reads outputs, ascending (see module)."""
    max_position: int
    theta: float = 1e6
    eps: float = 1e-6
    window: int | None = None
    """Keys visible to a query, itself included; None for all."""
    silu: bool = True
    """Gates are SiLU, not tanh GELU."""
    norm_before_residual: bool = False
    """The residual is the normed state, not the raw one."""
    norm_before_fc: bool = False
    """One norm over all features before `fc`."""
    fc_norm: bool = False
    """A norm per feature layer before `fc` (EAGLE-3.1)."""
    norm_output: bool = False
    """The final norm also applies to what is fed back (EAGLE-3.1)."""

    @property
    def features(self) -> int:
        """Width of the target's features per token."""
        return len(self.layers) * self.hidden


class Head(NamedTuple):
    """A head on the host. weights: numpy arrays by the names of `tensors`; target_ids
    [draft_vocab] int64, ascending: the target's id of each draft id."""

    spec: HeadSpec
    weights: dict[str, np.ndarray]
    target_ids: np.ndarray


def tensors(spec: HeadSpec) -> dict[str, tuple[int, ...]]:
    """Shape by name; linears are [out, in], and names are the flat form's without `midlayer.`
    and `.weight`."""
    wide, query, key = 2 * spec.hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (spec.hidden, spec.features),
        "self_attn.q_proj": (query, wide),
        "self_attn.k_proj": (key, wide),
        "self_attn.v_proj": (key, wide),
        "self_attn.o_proj": (spec.hidden, query),
        "mlp.gate_proj": (spec.ffw, spec.hidden),
        "mlp.up_proj": (spec.ffw, spec.hidden),
        "mlp.down_proj": (spec.hidden, spec.ffw),
        "lm_head": (spec.draft_vocab, spec.hidden),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")
    shapes |= dict.fromkeys(norms, (spec.hidden,))
    if spec.norm_before_fc:
        shapes["input_norm"] = (spec.features,)
    if spec.fc_norm:
        shapes |= {f"fc_norm.{i}": (spec.hidden,) for i in range(len(spec.layers))}
    return shapes


def sized(arch: Arch) -> HeadSpec:
    """A head such as is trained for a target of this size (configs/eagle3-31b.toml), to measure
    with. Raises UserError where the target is too small."""
    heads = max(1, arch.hidden // HEAD_DIM)
    return HeadSpec(
        hidden=arch.hidden,
        ffw=max(layer.ffw for layer in arch.layers),
        heads=heads,
        kv_heads=max(n for n in range(1, 7) if heads % n == 0),
        head_dim=HEAD_DIM,
        vocab=arch.vocab,
        draft_vocab=min(DRAFT_VOCAB, arch.vocab),
        layers=default_layers(len(arch.layers)),
        max_position=arch.max_position,
    )


def random_head(spec: HeadSpec, seed: int = 0) -> Head:
    """Norms of 1, linears with std 1 / sqrt(in) in float32, draft ids spread over the vocabulary;
    to measure with: values repeat themselves, as gigabytes of noise would take minutes."""
    noise = np.random.default_rng(seed).standard_normal(NOISE, np.float32)

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        return np.resize(noise * np.float32(shape[-1] ** -0.5), shape)

    weights = {name: draw(shape) for name, shape in tensors(spec).items()}
    return Head(spec, weights, np.arange(spec.draft_vocab) * spec.vocab // spec.draft_vocab)


def default_layers(count: int) -> tuple[int, ...]:
    """A low, a middle and a high layer of a target with `count` of them, as is usual.

    Raises UserError where they would collide (4 to 6 layers).
    """
    layers = (1, count // 2 - 1, count - 4)
    if not 0 <= layers[0] < layers[1] < layers[2]:
        raise UserError(
            f"a target with {count} layers has no default feature layers: name three with `layers`"
        )
    return layers


def check_spec(spec: HeadSpec) -> None:
    """Raise UserError for a head that could not run anywhere."""
    if len(spec.layers) < 2 or list(spec.layers) != sorted(set(spec.layers)):
        raise UserError(
            f"feature layers must be two or more different ones, ascending, got {spec.layers}"
        )
    if spec.heads % spec.kv_heads or spec.head_dim % 2:
        raise UserError(
            f"{spec.heads} heads, {spec.kv_heads} kv heads, head_dim {spec.head_dim}: kv heads "
            "must divide heads, and head_dim must be even"
        )
    if not 0 < spec.draft_vocab <= spec.vocab:
        raise UserError(f"draft_vocab must be 1 to {spec.vocab}, got {spec.draft_vocab}")


def check_pair(spec: HeadSpec, arch: Arch) -> None:
    """Raise UserError where a head was not made for this target."""
    if spec.hidden != arch.hidden:
        raise UserError(
            f"this EAGLE-3 head is for a target of width {spec.hidden}, not {arch.hidden}: "
            "use the head that was trained for this model"
        )
    if not fits_vocabulary(spec.vocab, arch.vocab):
        raise UserError(
            f"this EAGLE-3 head is for a vocabulary of {spec.vocab}, not {arch.vocab}: "
            "use the head that was trained for this model"
        )
    if not 0 <= spec.layers[0] <= spec.layers[-1] < len(arch.layers):
        raise UserError(
            f"this EAGLE-3 head reads the outputs of layers {spec.layers}, but the target has "
            f"layers 0 to {len(arch.layers) - 1}: use the head that was trained for this model"
        )
