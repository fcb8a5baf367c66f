"""One layer on several cards: each rank has some of the heads and of the feed-forward's features.

Rows of Q, K, V, gate and up are divided, and columns of O and down: what these leave is a part of
the sum, which the cards exchange (exchange.py). Everything else is on every card: embedding and
head, norms, drafters, the sampler. So each card chooses the same tokens for itself.

A row_parallel weight has eight k groups with a sum of their own, which are added as a binary tree
(tiles.py); a rank has 8 / ranks neighbours of them, a subtree. The bits are those of one card.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from specdec.core.errors import UserError
from targets.arch import Arch, LayerSpec
from targets.cuda.exchange import Inboxes, PartialSum
from targets.cuda.four_bits import FourBits
from targets.cuda.inputs import Input
from targets.cuda.int4 import Int4
from targets.cuda.kernels import Kernels
from targets.cuda.launch import Variant
from targets.cuda.ops import Linear, Rows
from targets.cuda.reader import Part, Plain
from targets.cuda.tiles import EIGHTHS, INPUTS, k_groups
from targets.cuda.variants import norm_variant

RANKS = (2, 4, 8)
"""How many cards can share a model: eight k groups are divided evenly."""
ROWS = {"q_proj", "gate_proj", "up_proj"}
"""Weights of which a rank has some rows, in the order of the ranks."""
KV_ROWS = {"k_proj", "v_proj"}
"""The same of K/V heads: some ranks have the same ones where there are fewer heads than ranks."""
COLUMNS = {"o_proj", "down_proj"}
"""Weights of which a rank has some columns."""


@dataclass(frozen=True)
class Rank:
    """One of the cards that share a model of this architecture."""

    number: int
    count: int
    arch: Arch
    """The whole model's."""

    @property
    def k_groups(self) -> int:
        """Of its part of a row_parallel weight."""
        return EIGHTHS // self.count

    @property
    def own(self) -> Arch:
        """Its part of each layer."""
        return replace(self.arch, layers=tuple(map(self._layer, self.arch.layers)))

    def _layer(self, layer: LayerSpec) -> LayerSpec:
        return replace(
            layer,
            heads=layer.heads // self.count,
            kv_heads=max(1, layer.kv_heads // self.count),
            whole_kv_heads=layer.kv_heads,
            ffw=layer.ffw // self.count,
        )

    def cut(self, name: str, raw: Part) -> Part:
        """`reader.Cut`."""
        kind = name.rsplit(".", 1)[-1]
        if kind in COLUMNS:
            return _columns(raw, self._slice(_inner(raw)))
        if kind in ROWS:
            return _rows(raw, self._slice(_outer(raw)))
        if kind in KV_ROWS:
            layer = self.arch.layers[int(name.split(".")[1])]
            first = self.number * layer.kv_heads // self.count
            own = max(1, layer.kv_heads // self.count)
            dim = _outer(raw) // layer.kv_heads
            return _rows(raw, slice(first * dim, (first + own) * dim))
        return raw

    def _slice(self, size: int) -> slice:
        each = size // self.count
        return slice(self.number * each, (self.number + 1) * each)


def refuse_ranks(arch: Arch, count: int) -> None:
    """Raises UserError for a model that so many cards can't share."""
    if count not in RANKS:
        raise UserError(f"--tp must be 1, {', '.join(map(str, RANKS))} on GPUs, got {count}")
    if arch.moe or arch.per_layer_input:
        raise UserError(
            "--tp above 1 takes the dense models 12B and 31B: for others run a server per card "
            "behind a load balancer, which serves more users as well"
        )
    refuse_layers(arch, count)


def refuse_layers(arch: Arch, count: int, owner: str = "") -> None:
    """Raises UserError for layers that so many cards can't share. owner: if not the target's."""
    for number, layer in enumerate(arch.layers):
        sizes = layer.ffw, layer.heads * layer.head_dim
        uneven = layer.heads % count or (layer.kv_heads % count and count % layer.kv_heads)
        if uneven or any(size % (EIGHTHS * INPUTS) for size in sizes):
            raise UserError(
                f"{count} cards can't share layer {number}{owner}: it has {layer.heads} heads of "
                f"{layer.head_dim}, {layer.kv_heads} K/V heads and {layer.ffw} features"
            )


class RankKernels(Kernels):
    """`ops.Ops` of one rank, on the current device."""

    multiplies_whole = False

    def __init__(
        self,
        rank: Rank,
        inboxes: Inboxes,
        max_len: int,
        kv: torch.dtype,
        kinds: set[str],
        more: Set[Variant] = frozenset(),
    ) -> None:
        """As `Kernels`."""
        self.k_groups = rank.k_groups
        read = kinds | ({"w8a8"} if "fp8" in kinds else set())
        norms = {norm_variant(kind, rank.arch.hidden, rank.count) for kind in read}
        super().__init__(rank.own, max_len, kv, kinds, more | norms)
        self.rank, self._inboxes, self._turn = rank, inboxes, 0
        self._one = torch.ones(rank.arch.hidden, device=self.device)
        self._groups = _groups_of(rank)
        pack, pack_codes = self._gemm.pack, self._gemm.pack_codes
        self.pack = partial(self._packed, pack)
        self.pack_codes = partial(self._packed_codes, pack_codes)

    def _packed(self, pack, values: Tensor, scale: Tensor | None, kind: str, layout: str) -> Linear:
        return pack(values, scale, kind, layout, self._groups_for(values.shape[-2], layout))

    def _packed_codes(self, pack, weight: FourBits, layout: str) -> Linear:
        return pack(weight, layout, self._groups_for(weight.codes.shape[-2], layout))

    def _groups_for(self, n: int, layout: str) -> int | None:
        return self.k_groups if layout == "row_parallel" else self._groups.get((n, layout))

    def begin(self) -> None:
        """A forward begins: all cards use the same inboxes for the same branch."""
        self._turn = 0

    def embed(self, head: Linear, rows: Rows, texts: Tensor | None = None) -> Tensor:
        self.begin()
        return super().embed(head, rows, texts)

    def branch(self, x: Input, weight: Linear) -> PartialSum:
        """A part of k: unscaled, for the norm that adds all parts."""
        assert weight.layout == "row_parallel", weight.layout
        scale = weight.scale
        own = self.linear(x, replace(weight, scale=None if scale is None else self._one))
        self._turn ^= 1
        return PartialSum(own, scale, self._inboxes, self._turn ^ 1)


def _groups_of(rank: Rank) -> dict[tuple[int, str], int]:
    """k groups of weights of which a rank has some rows, by their number here and layout: those of
    the whole weight."""
    found = {}
    for own, whole in zip(rank.own.layers, rank.arch.layers, strict=True):
        for layout, rows in (("plain", _qkv_rows), ("gated", _gate_up_rows)):
            key, groups = (rows(own), layout), k_groups(rows(whole), layout)
            assert found.setdefault(key, groups) == groups, key
    return found


def _qkv_rows(layer: LayerSpec) -> int:
    parts = 1 if layer.k_eq_v else 2
    own = parts * layer.kv_heads if layer.kv_from is None else 0
    return (layer.heads + own) * layer.head_dim


def _gate_up_rows(layer: LayerSpec) -> int:
    return 2 * layer.ffw


def _outer(raw: Plain | FourBits) -> int:
    return raw.codes.shape[-2] if isinstance(raw, FourBits) else raw[0].shape[-2]


def _inner(raw: Plain | FourBits) -> int:
    return raw.codes.shape[-1] if isinstance(raw, FourBits) else raw[0].shape[-1]


def _rows(raw: Part, part: slice) -> Part:
    if isinstance(raw, Int4):
        zero = None if raw.zero is None else raw.zero[part]
        return replace(
            raw, codes=raw.codes[part], scale=raw.scale[part], zero=zero, row=raw.row[part]
        )
    if isinstance(raw, FourBits):
        return replace(raw, codes=raw.codes[part], scale=raw.scale[part], row=raw.row[part])
    values, scale = raw
    kept = None if scale is None else scale[part]
    return values[part], kept  # pyright: ignore[reportReturnType]


def _columns(raw: Part, part: slice) -> Part:
    if not isinstance(raw, FourBits):
        values, scale = raw
        return values[:, part].contiguous(), scale  # pyright: ignore[reportReturnType]
    shared = raw.codes.shape[-1] // raw.scale.shape[-1]
    grouped = slice(part.start // shared, part.stop // shared)
    changed = {
        "codes": raw.codes[:, part].contiguous(),
        "scale": raw.scale[:, grouped].contiguous(),
    }
    if isinstance(raw, Int4) and raw.zero is not None:
        changed["zero"] = raw.zero[:, grouped].contiguous()
    return replace(raw, **changed)
