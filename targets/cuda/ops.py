"""What a forward pass is made of: the operations that both the kernels and the references offer.

`reference.Reference` computes them in plain torch on any device; `kernels.Kernels` launches our
CUDA kernels. `model.py` is written in these words only.

Shape legend: M rows of a call (B sequences times T tokens, row b * T + t), H hidden, V vocab.
`h` is the residual stream, float32 [M, H], updated in place. An `X` is a linear layer's input in
whatever layout and dtype its implementation likes: only the same implementation may read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from targets.arch import LayerSpec, MoeSpec
from targets.cuda.cache import LayerCache
from targets.cuda.four_bits import FourBits
from targets.sampling_params import Rules

X = Any
Branch = Any
"""What a branch of a layer adds to the residual stream [M, H], as its implementation keeps it: for
`norm` alone."""


@dataclass(frozen=True)
class Linear:
    """A weight [n, k], or one for each of E experts: `data` and per-row `scale` (None for wide
    weights) as the implementation keeps them. kind: fp8 (e4m3 values), w8a8 (e4m3 values that meet
    e4m3 inputs), int4 (or uint4, with zero points: int4.py), nvfp4 (nvfp4.py), int8 (int8.py), bf16
    or float32. layout: plain, row_parallel (O and down: what several devices would cut along k),
    gated (gate's rows, then up's), experts or experts_gated. k_groups: parts of k, contiguous in
    row_parallel weights; each has a sum of its own, and these are added as a binary tree. plain:
    the values once more in plain order (`Ops.with_plain`). dealt: the kind as which the tiles were
    packed (tiles.py), where it differs from the kind as which they are read: int16 is a head in two
    parts (int8.py), which is read as bf16, or its codes alone as int8."""

    n: int
    k: int
    kind: str
    data: Tensor
    scale: Tensor | None
    layout: str = "plain"
    k_groups: int = 1
    plain: Tensor | None = None
    dealt: str | None = None


@dataclass(frozen=True)
class NarrowHead:
    """The head's codes, and what their logits err by at most [n] (int8.py)."""

    weight: Linear
    error: Tensor

    @classmethod
    def of(cls, head: Linear, error: Tensor) -> NarrowHead:
        """head: in two parts, of which the codes are the first, in the same memory."""
        return cls(replace(head, kind="int8"), error)


class Choosing(NamedTuple):
    """By what a step's tokens are chosen. needs_sampler False: every row is a bare argmax."""

    rules: Rules
    needs_sampler: bool


@dataclass(frozen=True)
class Rows:
    """What a call feeds: tokens [B, T], start [B] (position of each first token), slot [B]
    (-1: the row sits this call out, nothing of it is stored); all int32 on the device. With
    pictures: soft [B * T, H], what takes the place of embeddings where tokens are pictures' places
    (ids below NO_GUESS), of any float dtype; reach [B, T] int32, the last position that each token
    sees on sliding layers, which never falls within a sequence (None: its own)."""

    tokens: Tensor
    start: Tensor
    slot: Tensor
    soft: Tensor | None = None
    reach: Tensor | None = None


def reach_of(rows: Rows, layer: LayerSpec) -> Tensor | None:
    """The reach that a call's tokens have in this layer."""
    return rows.reach if layer.sliding else None


Dense = tuple[Tensor, Tensor | None]
"""A weight's values and scale in plain order."""
Chosen = tuple[Tensor, Tensor]
"""Experts [M, top_k] int32 and their shares [M, top_k] float32, in rank order. Idle rows
and draft positions without a guess (NO_GUESS) pick no expert: -1, with shares of 0."""


class Opening(NamedTuple):
    """A branch's input: the stream, normed by weight `pre` (as it is where None), for a weight of
    this kind."""

    pre: Tensor | None
    kind: str


class Closing(NamedTuple):
    """How a branch ends: what it adds is normed by weight `post` (as it is where None), then the
    stream is scaled."""

    branch: Branch | None = None
    post: Tensor | None = None
    scalar: Tensor | None = None


NOTHING = Closing()
"""Where no branch ends."""


class DenseBranch(NamedTuple):
    """A MoE layer's dense branch: its input, its weights, and the norm of its output."""

    x: X
    gate_up: Linear
    down: Linear
    norm: Tensor


class RoutedBranch(NamedTuple):
    """A MoE layer's routed branch: the router with its input, then the experts with theirs, and the
    norm of the picked experts' sum."""

    x_router: X
    router: Linear
    per_expert: Tensor
    x: X
    gate_up: Linear
    down: Linear
    norm: Tensor


@dataclass(frozen=True)
class AttentionLayer:
    """One layer's attention. cache: the donor's where the layer shares another's K/V. Layers that
    aren't normed have no q_norm and k_norm. ahead: queries are turned for the position so far
    behind their row's, which is the last that they see (drafters that read the target's K/V)."""

    spec: LayerSpec
    cache: LayerCache
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    ahead: int = 0


class Ops(Protocol):
    @property
    def multiplies_whole(self) -> bool:
        """Whether a branch's product is here as a whole: long prompts are then multiplied by the
        library."""
        ...

    def pack(self, values: Tensor, scale: Tensor | None, kind: str, layout: str) -> Linear:
        """A weight as this implementation keeps it. values [n, k], or [E, n, k] for the layouts of
        experts; scale as values without the last axis."""
        ...

    def pack_codes(self, weight: FourBits, layout: str) -> Linear:
        """The same for 4-bit codes."""
        ...

    def with_plain(self, weight: Linear) -> Linear:
        """The same weight, with `dense`'s values kept beside it if prefill uses them."""
        ...

    def dense(self, weight: Linear) -> Dense:
        """Its values [n, k] and scale [n] in plain order (of experts [E * n, k] and [E * n]), for
        library matmuls (prefill); valid until the next call."""
        ...

    def dense_parts(self, weight: Linear) -> Iterator[tuple[slice, Dense]]:
        """`dense` of a gated weight, some features at a time where all would take much memory:
        which features, and the values of their gates, then their ups; each valid until the next."""
        ...

    def embed(self, head: Linear, rows: Rows, texts: Tensor | None = None) -> Tensor:
        """The tokens' rows of the head's own table -> h [M, H] float32; ids outside the vocabulary
        count as 0. texts [slots, positions] int32: where tokens are written too; an idle row may
        have any start and writes none."""
        ...

    def norm(
        self, h: Tensor, opening: Opening, closing: Closing = NOTHING, kept: Tensor | None = None
    ) -> X:
        """h = (h + rms(branch) * post) * scalar in place; -> rms(h) * pre. kept [M, H]: becomes a
        copy of h, where a branch ends."""
        ...

    def norm_moe(
        self,
        h: Tensor,
        openings: tuple[Opening, Opening, Opening],
        rows: Rows,
        closing: Closing = NOTHING,
    ) -> tuple[X, X, X]:
        """`norm` for what opens a MoE layer: the dense branch, the router, the experts of these
        rows."""
        ...

    def linear(self, x: X, weight: Linear) -> Tensor:
        """-> [M, n] float32."""
        ...

    def branch(self, x: X, weight: Linear) -> Branch:
        """`linear` for `norm`."""
        ...

    def gated(self, x: X, gate_up: Linear, kind: str) -> X:
        """gelu_tanh(x gate) * (x up), or with SiLU, by the architecture: the input of a
        row_parallel weight. `gate_up` holds gate's rows, then up's."""
        ...

    def attention(self, qkv: Tensor, layer: AttentionLayer, rows: Rows, kind: str) -> X:
        """qkv [M, q (+ k (+ v))]: norm, rotate, store new K/V (not where the layer shares
        another's), attend over the cache alone -> input of a row_parallel weight."""
        ...

    def store(self, qkv: Tensor, layer: AttentionLayer, rows: Rows) -> None:
        """The part of `attention` that stores the new K/V."""
        ...

    def per_layer_inputs(self, mixed: Tensor, table: Tensor, norm: Tensor, rows: Rows) -> Tensor:
        """mixed [M, L * P], the projection of h -> [M, L * P] float32 (E2B, E4B)."""
        ...

    def gated_per_layer(self, x: X, gate: Linear, inputs: Tensor, layer: int, kind: str) -> X:
        """gelu_tanh(x gate) * inputs of this layer."""
        ...

    def mixture(self, dense: DenseBranch, routed: RoutedBranch, rows: Rows, moe: MoeSpec) -> Branch:
        """rms(dense) * its norm + rms(sum of the picked experts) * its norm. Picked are the best by
        softmax(x router / sqrt(H)); their shares sum to 1 before each expert's own factor."""
        ...

    def grouped(self, x: Tensor, ends: Tensor, weight: Linear) -> Tensor:
        """Prefill's rows [R, k] (`PrefillInput.values`) sorted by expert, each times its own
        expert's matrix: a weight of 4 bits. ends [E] int32: where each expert's rows end -> [R, n]
        bfloat16, or float32 of the reference."""
        ...

    def head(self, x: X, table: Linear, softcap: float | None) -> Tensor:
        """-> soft-capped logits [M, V] float32."""
        ...

    def heads(self, values: Tensor) -> tuple[Linear, NarrowHead | None]:
        """bfloat16 values [n, k] -> the head (`embed` reads its table too), and its codes; None if
        a head of so many words is not certified."""
        ...

    def candidates(
        self,
        x: X,
        heads: tuple[Linear, NarrowHead],
        softcap: float | None,
        rows: Rows,
        choosing: Choosing,
    ) -> Tensor:
        """-> [M, V] float32: `head`'s logits of all words that `choosing` can choose, -inf or the
        same for others (certified.py). At most `certified.MOST_ROWS` rows."""
        ...

    def choose(
        self,
        logits: Tensor,
        rules: Rules,
        rows: Rows,
        needs_sampler: bool,
        masks: Tensor | None = None,
    ) -> Tensor:
        """logits [B, T, V] -> [B, T] int32. needs_sampler False: every row is a bare argmax. masks
        [B, T, words] int32: the allowed tokens (`specdec.core.constraint`)."""
        ...
