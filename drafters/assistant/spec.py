"""What an assistant is: its dimensions, its tensors, the target that it belongs to. No framework.

An assistant is Google's draft model of a Gemma 4 (`…-it-assistant`): four decoder layers without
keys and values of their own. Each attends to those that the target cached in its last layer of the
same type. Formulas: transformers 5.23, `models/gemma4_assistant`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from specdec.core.errors import UserError
from targets.arch import Arch, LayerSpec, fits_vocabulary
from targets.tensors import TensorSpec, layer_tensors

NOISE = 1_000_003
"""Random values that repeat: a prime, so that no two rows of a weight are the same."""
SLIDING = 3
"""Sliding layers of a released assistant; a global one follows."""


@dataclass(frozen=True)
class Clusters:
    """An ordered head: words are grouped in clusters of equal size, and only words of the `read`
    clusters with the best-fitting centroids are scored."""

    count: int
    read: int


@dataclass(frozen=True)
class AssistantSpec:
    """One assistant's dimensions; hashable, so that programs can be compiled for it."""

    backbone: int
    """The target's width: of the states that it is fed, and of those that it returns."""
    arch: Arch
    """Its decoder. Once it is paired, `kv_from` of each layer is the index of the target's layer
    with the keys and values that it attends to."""
    clusters: Clusters | None
    """None: a dense head, which scores every word."""
    tied: bool = True
    """The head is `embed_tokens`. Nothing else is: it is the target that embeds tokens."""

    @property
    def sources(self) -> tuple[int, ...]:
        """The target's layer that each layer reads, once it is paired."""
        return tuple(layer.kv_from for layer in self.arch.layers if layer.kv_from is not None)

    @property
    def scored(self) -> int:
        """Words that a whole head scores at each step."""
        vocab = self.arch.vocab
        return self.clusters.read * (vocab // self.clusters.count) if self.clusters else vocab


class Assistant(NamedTuple):
    """An assistant on the host. weights: arrays by the names of `tensors`, as they are stored.
    target_ids [D] int64, ascending: the words that a dense head scores; None for all of them."""

    spec: AssistantSpec
    weights: dict[str, np.ndarray]
    target_ids: np.ndarray | None = None


def tensors(spec: AssistantSpec) -> dict[str, TensorSpec]:
    """By name; `head` [vocab, d] is what turns states into logits."""
    arch = spec.arch
    norm = TensorSpec((arch.hidden,), ("none",))
    axis = "none" if spec.clusters else "vocab"  # a row's clusters may lie anywhere
    table = {
        "pre_projection": _linear(arch.hidden, 2 * spec.backbone),
        "post_projection": _linear(spec.backbone, arch.hidden),
        "head": TensorSpec((arch.vocab, arch.hidden), (axis, "none"), linear=True),
        "norm": norm,
    }
    if spec.clusters:
        table["centroids"] = _linear(spec.clusters.count, arch.hidden)
        table["token_ordering"] = TensorSpec((arch.vocab,), ("none",))
    for i, layer in enumerate(arch.layers):
        table |= {f"layers.{i}.{name}": t for name, t in layer_tensors(arch, layer).items()}
    return table


def _linear(out: int, inner: int) -> TensorSpec:
    return TensorSpec((out, inner), ("none", "none"), linear=True)


def source_of(arch: Arch, sliding: bool) -> int:
    """The target's last layer of a type that has keys and values of its own. Raises UserError."""
    for i in reversed(range(len(arch.layers))):
        if arch.layers[i].kv_from is None and arch.layers[i].sliding == sliding:
            return i
    kind = "sliding" if sliding else "global"
    raise UserError(f"the target has no {kind} layer with keys and values for an assistant")


def paired(spec: AssistantSpec, arch: Arch) -> AssistantSpec:
    """The assistant with its layers tied to the target's. Raises UserError where it was not made
    for this target."""
    vocabularies = spec.arch.vocab, arch.vocab
    for what, own, other, fits in (
        ("of width", spec.backbone, arch.hidden, spec.backbone == arch.hidden),
        ("with a vocabulary of", *vocabularies, fits_vocabulary(*vocabularies)),
    ):
        if not fits:
            raise UserError(
                f"this assistant is for a target {what} {own}, not {other}: use the one that was "
                "made for this model"
            )
    layers = tuple(_tied(i, layer, arch) for i, layer in enumerate(spec.arch.layers))
    return replace(spec, arch=replace(spec.arch, layers=layers))


def _tied(i: int, layer: LayerSpec, arch: Arch) -> LayerSpec:
    number = source_of(arch, layer.sliding)
    source = arch.layers[number]
    for what in ("window", "kv_heads", "head_dim", "rope"):
        own, other = getattr(layer, what), getattr(source, what)
        if own != other:
            raise UserError(
                f"layer {i} of this assistant reads keys and values with {what} {own}, but layer "
                f"{number} of the target has {other}: use the assistant that was made for this "
                "model"
            )
    return replace(layer, kv_from=number, k_eq_v=source.k_eq_v)


def released_size(arch: Arch) -> AssistantSpec:
    """One of the size that is released for such a target, to measure with."""
    if arch.per_layer_input:  # E2B and E4B
        heads = max(4, *(layer.kv_heads for layer in arch.layers))
        return replace(sized(arch, 256, 2048, heads), clusters=Clusters(2048, 32))
    return sized(arch, 1024, 8192, arch.layers[0].heads)


def sized(arch: Arch, hidden: int, ffw: int, heads: int, sliding: int = SLIDING) -> AssistantSpec:
    """One with a dense head for this target. sliding: layers before the global one."""

    def layer(near: bool) -> LayerSpec:
        number = source_of(arch, near)
        own = {"heads": heads, "ffw": ffw, "moe": None}
        return replace(arch.layers[number], kv_from=number, **own)

    own = replace(
        arch,
        hidden=hidden,
        layers=(*[layer(True)] * sliding, layer(False)),
        softcap=None,
        per_layer_input=0,
        per_layer_vocab=0,
    )
    return AssistantSpec(arch.hidden, own, None)


def random_assistant(spec: AssistantSpec, seed: int = 0) -> Assistant:
    """Norms and scalars of 1, linears with std 1 / sqrt(in) in float32, clusters of neighbouring
    ids; to measure with: values repeat themselves, as gigabytes of noise would take minutes."""
    noise = np.random.default_rng(seed).standard_normal(NOISE, np.float32)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name == "token_ordering":
            return np.arange(*shape)
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        return np.resize(noise * np.float32(shape[-1] ** -0.5), shape)

    return Assistant(spec, {name: draw(name, t.shape) for name, t in tensors(spec).items()})
