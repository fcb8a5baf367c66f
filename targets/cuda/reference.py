"""The forward's operations in plain torch, on any device: what every kernel is compared with.

What may depend on neighbours is computed row by row, from fresh tensors of a shape that no other
row decides: a CPU library blocks a matmul by its shape and treats the end of an array apart (gelu
there is another function). Norms and roundings take all rows at once: their single steps are
exactly rounded, and a row's sum is in an order of its own (tests/targets/cuda/test_cuda_parity.py).
Shape legend: as in ops.py; K kv heads, G = heads / K, D head_dim, n keys, C chunks of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch import Tensor

from specdec.core.types import NO_GUESS
from targets.arch import Arch, LayerSpec, MoeSpec, Rope
from targets.cuda import cache as kv, certified, int8, sampling
from targets.cuda.formulas import (
    as_e4m3,
    attend,
    gate,
    gelu,
    inverse_frequencies,
    key_and_value,
    known,
    mix_inputs,
    query,
    rank,
    rms,
    scaled,
    soft_cap,
    turn,
)
from targets.cuda.four_bits import FourBits
from targets.cuda.int8 import Int16
from targets.cuda.ops import (
    NOTHING,
    AttentionLayer,
    Choosing,
    Chosen,
    Closing,
    Dense,
    DenseBranch,
    Linear,
    NarrowHead,
    Opening,
    RoutedBranch,
    Rows,
    reach_of,
)
from targets.cuda.prefill_reference import by_expert
from targets.cuda.tiles import EIGHTHS
from targets.sampling_params import Rules


def each_row(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """function on row r of all tensors, stacked. Rows are copied: an aligned start for each."""
    return torch.stack([function(*(t.clone() for t in row)) for row in zip(*tensors, strict=True)])


def wide(weight: Linear) -> Tensor:
    """Values [n, k] in float32, without the scale."""
    if weight.dealt == "int16" and weight.scale is not None:
        return Int16.unpacked(weight.data, weight.scale).values().float()
    return weight.data.float()


def embedded(head: Linear, ids: Tensor) -> Tensor:
    """Rows of the head's own table by token [M, k]; ids outside the vocabulary count as 0."""
    at = known(ids, head.n)
    if head.dealt != "int16" or head.scale is None:
        return head.data[at]
    row = head.scale[at]
    return Int16.unpacked(head.data[at], row).values() * row[:, None].bfloat16()


def as_input(x: Tensor, kind: str, groups: int = 1) -> Tensor:
    """bf16 weights take bf16 inputs; narrow ones take them as finely as the implementation can,
    unless they take e4m3 as well (w8a8). groups: k groups with a scale of their own there."""
    if kind == "w8a8":
        return as_e4m3(x, groups)
    return x.bfloat16() if kind == "bf16" else x


class Reference:
    """`ops.Ops` in torch. Weights are [n, k] tensors, an X is a tensor [M, k]."""

    multiplies_whole = True

    def __init__(self, arch: Arch) -> None:
        self.arch = arch

    def pack(self, values: Tensor, scale: Tensor | None, kind: str, layout: str) -> Linear:
        n, k = values.shape[-2:]
        flat = values.flatten(0, -2).contiguous()
        return Linear(n, k, kind, flat, None if scale is None else scale.flatten(), layout)

    def pack_codes(self, weight: FourBits, layout: str) -> Linear:
        n, k = weight.codes.shape[-2:]
        values = weight.values().reshape(-1, k)
        return Linear(n, k, weight.kind, values, weight.row.flatten(), layout)

    def with_plain(self, weight: Linear) -> Linear:
        return weight

    def dense(self, weight: Linear) -> Dense:
        return weight.data, weight.scale

    def dense_parts(self, weight: Linear) -> Iterator[tuple[slice, Dense]]:
        yield slice(0, weight.n // 2), self.dense(weight)

    def embed(self, head: Linear, rows: Rows, texts: Tensor | None = None) -> Tensor:
        if texts is not None:
            runs = rows.slot >= 0
            kv.remember(texts, rows.tokens[runs], rows.start[runs], rows.slot[runs])
        return scaled(embedded(head, rows.tokens.flatten()), self.arch.hidden)

    def norm(
        self, h: Tensor, opening: Opening, closing: Closing = NOTHING, kept: Tensor | None = None
    ) -> Tensor:
        self._close(h, closing)
        if kept is not None:
            kept.copy_(h)
        return self._opened(h, opening)

    def _close(self, h: Tensor, closing: Closing) -> None:
        branch, post, scalar = closing
        if branch is not None:
            h += branch if post is None else rms(branch, post, self.arch.eps)
        if scalar is not None:
            h *= scalar

    def _opened(self, h: Tensor, opening: Opening) -> Tensor:
        if opening.pre is None:
            return as_input(h.clone(), opening.kind)
        return as_input(rms(h, opening.pre, self.arch.eps), opening.kind)

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        return _matmul(x, wide(weight), weight.scale)

    branch = linear

    def gated(self, x: Tensor, gate_up: Linear, kind: str) -> Tensor:
        rows = self.linear(x, gate_up)
        return as_input(each_row(lambda row: gate(row, self.arch.silu), rows), kind, EIGHTHS)

    def attention(self, qkv: Tensor, layer: AttentionLayer, rows: Rows, kind: str) -> Tensor:
        """Waits for slots and positions to reach the host, unlike a kernel."""
        spec = layer.spec
        if spec.kv_from is None:
            self.store(qkv, layer, rows)
        queries = query(qkv, layer.q_norm, spec, self.arch.eps)
        out = torch.zeros((len(qkv), spec.heads * spec.head_dim), device=qkv.device)
        tokens, reach = rows.tokens.shape[1], reach_of(rows, spec)
        reaches = None if reach is None else reach.flatten().tolist()
        for r, (slot, position) in enumerate(_places(rows)):
            if slot >= 0:
                q = turn(queries[r].clone(), *_turns(spec, position + layer.ahead, qkv.device))
                newest = position + (tokens - 1 - r % tokens if spec.both_ways else 0)
                newest = newest if reaches is None else reaches[r]
                mixed = attend(q, layer.cache, slot, position, spec.window, newest)
                out[r] = mixed.flatten()
        return as_input(out, kind, EIGHTHS)

    def store(self, qkv: Tensor, layer: AttentionLayer, rows: Rows) -> None:
        spec, tokens = layer.spec, rows.tokens.shape[1]
        made = key_and_value(qkv, layer.k_norm, spec, self.arch.eps)
        parts = (part.split(tokens) for part in made)
        for slot, start, k, v in zip(rows.slot.tolist(), rows.start.tolist(), *parts, strict=True):
            if slot >= 0:
                turns = [_turns(spec, start + t, qkv.device) for t in range(tokens)]
                turned = [turn(row.clone(), *by) for row, by in zip(k, turns, strict=True)]
                kv.write(layer.cache, slot, start, torch.stack(turned), v)

    def per_layer_inputs(self, mixed: Tensor, table: Tensor, norm: Tensor, rows: Rows) -> Tensor:
        return mix_inputs(self.arch, mixed, table, norm, rows.tokens.flatten())

    def gated_per_layer(
        self, x: Tensor, gate: Linear, inputs: Tensor, layer: int, kind: str
    ) -> Tensor:
        width = self.arch.per_layer_input
        own = inputs[:, layer * width : (layer + 1) * width]
        return as_input(each_row(gelu, self.linear(x, gate)) * own, kind)

    def norm_moe(
        self,
        h: Tensor,
        openings: tuple[Opening, Opening, Opening],
        rows: Rows,
        closing: Closing = NOTHING,
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._close(h, closing)
        dense, router, experts = (self._opened(h, opening) for opening in openings)
        return dense, router, experts

    def route(
        self, x: Tensor, proj: Linear, per_expert: Tensor, rows: Rows, moe: MoeSpec
    ) -> Chosen:
        """The router's choice, by softmax(x proj / sqrt(H))."""
        logits = self.linear(x, proj) * self.arch.hidden**-0.5
        shares = each_row(lambda row: row.softmax(-1), logits)
        ranked = [rank(row[None].clone(), per_expert, moe) for row in shares]
        numbers, parts = map(torch.cat, zip(*ranked, strict=True))
        out = ((rows.slot[:, None] < 0) | (rows.tokens == NO_GUESS)).flatten()[:, None]
        return numbers.masked_fill(out, -1), parts.masked_fill(out, 0.0)

    def experts(self, x: Tensor, chosen: Chosen, gate_up: Linear, down: Linear) -> Tensor:
        """The chosen experts, summed in rank order -> [M, H]; 0 where a row picked no expert."""
        out = torch.zeros((len(x), down.n), device=x.device)
        for row, numbers, shares, total in zip(x, *chosen, out, strict=True):
            for number, share in zip(numbers.tolist(), shares, strict=True):
                if number < 0:
                    continue
                part = self.linear(row[None], expert(gate_up, number))
                x_down = as_input(each_row(gate, part), down.kind)
                total += share * self.linear(x_down, expert(down, number))[0]
        return out

    def grouped(self, x: Tensor, ends: Tensor, weight: Linear) -> Tensor:
        own = (self.dense(expert(weight, number)) for number in range(len(ends)))
        return by_expert(x, ends, own)

    def mixture(self, dense: DenseBranch, routed: RoutedBranch, rows: Rows, moe: MoeSpec) -> Tensor:
        chosen = self.route(*routed[:3], rows, moe)
        x = self.gated(dense.x, dense.gate_up, dense.down.kind)
        experts = self.experts(routed.x, chosen, routed.gate_up, routed.down)
        first = rms(self.linear(x, dense.down), dense.norm, self.arch.eps)
        return first + rms(experts, routed.norm, self.arch.eps)

    def choose(
        self,
        logits: Tensor,
        rules: Rules,
        rows: Rows,
        needs_sampler: bool,
        masks: Tensor | None = None,
    ) -> Tensor:
        if masks is not None:
            logits = sampling.masked(logits, masks)
        if needs_sampler:
            return sampling.choose(logits, *rules, rows)
        return sampling.choose_greedy(logits, rules.bias, rows)

    def head(self, x: Tensor, table: Linear, softcap: float | None) -> Tensor:
        return each_row(lambda row: soft_cap(row, softcap), self.linear(x, table))

    def heads(self, values: Tensor) -> tuple[Linear, NarrowHead | None]:
        """With the same values as the kernels' heads."""
        if len(values) % int8.WORDS:
            return self.pack(values, None, "bf16", "plain"), None
        head, error = int8.quantise(values)
        n, k = values.shape
        whole = Linear(n, k, "bf16", head.packed(), head.narrow.row, dealt="int16")
        return whole, NarrowHead.of(whole, error)

    def candidates(
        self,
        x: Tensor,
        heads: tuple[Linear, NarrowHead],
        softcap: float | None,
        rows: Rows,
        choosing: Choosing,
    ) -> Tensor:
        head, (codes, error) = heads[0], (heads[1].weight, heads[1].error)
        assert codes.scale is not None
        values = Int16.unpacked(codes.data, codes.scale).narrow.values().float()
        around = _matmul(x.half(), values, codes.scale)
        apart = error * certified.length(x)[:, None]
        ties = certified.TIES * (softcap or 0.0)
        ends = soft_cap(around - apart, softcap) - ties, soft_cap(around + apart, softcap) + ties
        logits = self.head(x, head, softcap)
        for row, found in zip(logits, certified.candidates(ends, rows, choosing), strict=True):
            if found is not None:
                row.masked_fill_(~found, -torch.inf)
        return logits


@lru_cache(maxsize=64)
def _inverse(rope: Rope, head_dim: int, device: torch.device) -> Tensor:
    """Inverse frequencies, cached: every call of a layer's kind needs them again."""
    return inverse_frequencies(rope, head_dim, device)


def _turns(spec: LayerSpec, position: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return _cos_and_sin(spec.rope, spec.head_dim, position, device)


@lru_cache(maxsize=4096)
def _cos_and_sin(
    rope: Rope, head_dim: int, position: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Of a position's angles, cached: each layer and head turns by the same ones."""
    angles = position * _inverse(rope, head_dim, device)
    return angles.cos(), angles.sin()


def _places(rows: Rows) -> list[tuple[int, int]]:
    """Slot and position of each row of a call."""
    tokens, starts = rows.tokens.shape[1], rows.start.tolist()
    return [
        (slot, starts[b] + t) for b, slot in enumerate(rows.slot.tolist()) for t in range(tokens)
    ]


def expert(weight: Linear, number: int) -> Linear:
    """One expert's rows of weights that hold all of them."""
    rows = slice(number * weight.n, (number + 1) * weight.n)
    scale = None if weight.scale is None else weight.scale[rows]
    return Linear(weight.n, weight.k, weight.kind, weight.data[rows], scale)


def _matmul(x: Tensor, values: Tensor, scale: Tensor | None) -> Tensor:
    out = each_row(lambda row: values @ row.float(), x)
    return out if scale is None else out * scale
