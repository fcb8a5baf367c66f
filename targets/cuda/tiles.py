"""Weights in the order in which `kernels/gemm.cu` reads them.

A tile is 16 rows; every CTA owns equally many and walks all inputs in steps. Memory holds every
CTA's first step, then every CTA's second, and so on, so that the whole GPU reads one stretch at a
time; within a step, warp by warp in the tensor cores' fragment order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from targets.cuda.ops import Linear

TILE = 16
INPUTS = 32
"""Inputs of one block: a tile of a block is what a warp loads at once."""
INPUT_ALIGN = 64
TILE_BYTES = {"fp8": 512, "w8a8": 512, "bf16": 1024}
VALUE_BYTES = {"fp8": 1, "w8a8": 1, "bf16": 2}
"""Bytes of one value."""
TILES_PER_PASS = 22
WARPS = {1: 11, 2: 11, 3: 8}
"""By tiles per warp, the most warps of a CTA (gemm.cu adds a producer, and doubles them for many
tokens); wide ones need more registers each."""
STEP_BYTES = 24 * 1024
BLOCKS = 16
"""Most blocks of inputs per step: for 64 tokens they are 64 KiB, and two steps must fit."""
DEPTHS = (1, 2, 3, 4)
"""Blocks of inputs per warp and step."""
GATE_ROWS = {"fp8": TILE, "w8a8": TILE // 2, "bf16": TILE}
"""Rows of gate that stand together, before as many of up: a thread of w8a8.cu has rows 8 apart."""
TILES_PER_CTA = 12
"""And pass, of w8a8.cu: one per warp."""
ACTIVATION_SCALE = 32.0
"""Inputs of fp8 weights travel divided by this (kernels/common.cuh)."""


@dataclass(frozen=True)
class Schedule:
    """How a weight is dealt: a function of its shape and the machine alone.

    ctas x passes x tiles cover the rows; steps x k_groups x depth blocks cover the inputs; a
    CTA's warps are row_groups (of `wide` tiles each) x k_groups.
    """

    ctas: int
    passes: int
    tiles: int
    wide: int
    row_groups: int
    k_groups: int
    depth: int
    steps: int

    @property
    def warps(self) -> int:
        return self.row_groups * self.k_groups

    def step_bytes(self, kind: str) -> int:
        return self.warps * self.depth * self.wide * TILE_BYTES[kind]


def padded_inputs(k: int) -> int:
    return -(-k // INPUT_ALIGN) * INPUT_ALIGN


@cache
def schedule(n: int, k: int, kind: str, gated: bool, processors: int) -> Schedule:
    """n rows (of both halves where gated) by k inputs on this many multiprocessors."""
    tiles = 2 * -(-(n // 2) // TILE) if gated else -(-n // TILE)
    each = -(-tiles // processors)
    passes = -(-each // TILES_PER_PASS)
    each = -(-each // passes)
    wide = 2 if gated or each % 2 == 0 else 3 if each % 3 == 0 else 1
    if wide == 1 and each > WARPS[1]:
        wide = 2
    each = -(-each // wide) * wide
    row_groups = each // wide
    blocks = padded_inputs(k) // INPUTS
    k_groups = 1
    if passes == 1:
        k_groups = max(g for g in (1, 2, 4, 8) if blocks % g == 0 and g * row_groups <= WARPS[wide])
    step = row_groups * k_groups * wide * TILE_BYTES[kind]
    depths = (d for d in DEPTHS if blocks % (d * k_groups) == 0 and d * k_groups <= BLOCKS)
    depth = max((d for d in depths if d * step <= STEP_BYTES), default=1)
    ctas = -(-tiles // (each * passes))
    return Schedule(
        ctas, passes, each, wide, row_groups, k_groups, depth, blocks // (k_groups * depth)
    )


@cache
def w8a8_schedule(n: int, k: int, gated: bool, processors: int) -> Schedule:
    """A CTA (CTA, k group) per multiprocessor: the least that one has to read, in as few k groups
    as that takes, since their sums are written and read again."""
    tiles = -(-n // TILE)
    blocks = padded_inputs(k) // INPUTS

    def deal(groups: int) -> Schedule:
        each = -(-tiles // (processors // groups))
        passes = -(-each // TILES_PER_CTA)
        each = -(-each // passes)
        depth = max(d for d in DEPTHS if blocks % (d * groups) == 0)
        ctas, steps = -(-tiles // (each * passes)), blocks // (groups * depth)
        return Schedule(ctas, passes, each, 1, each, groups, depth, steps)

    whole = gated or n % 4 != 0
    choices = [g for g in (1, 2, 4, 8) if blocks % g == 0 and g <= (1 if whole else processors)]
    return min(map(deal, choices), key=lambda s: (s.passes * s.tiles / s.k_groups, s.k_groups))


@cache
def expert_schedule(n: int, k: int, gated: bool) -> Schedule:
    """Of one expert, on any machine: units of two tiles, each with all of its inputs."""
    tiles = 2 * -(-(n // 2) // TILE) if gated else -(-n // TILE)
    return Schedule(
        ctas=1,
        passes=-(-tiles // 2),
        tiles=2,
        wide=2,
        row_groups=1,
        k_groups=1,
        depth=padded_inputs(k) // INPUTS,
        steps=1,
    )


def schedule_of(weight: Linear, processors: int) -> Schedule:
    return _plan(weight.n, weight.k, weight.kind, weight.layout, processors)


def _plan(n: int, k: int, kind: str, layout: str, processors: int) -> Schedule:
    gated = layout.endswith("gated")
    if layout.startswith("experts"):
        return expert_schedule(n, k, gated)
    if kind == "w8a8":
        return w8a8_schedule(n, k, gated, processors)
    return schedule(n, k, kind, gated, processors)


def tile(values: Tensor, kind: str, layout: str, processors: int) -> Tensor:
    """values [n, k] -> bytes [passes, steps, ctas, step bytes]; of experts [E, n, k] ->
    [E, units, unit bytes]. gated: gate's rows, then up's; their tiles alternate, so that one warp
    holds both of a feature."""
    n, k = values.shape[-2:]
    plan = _plan(n, k, kind, layout, processors)
    rows = plan.ctas * plan.passes * plan.tiles * TILE
    words = _words(values.reshape(-1, k), padded_inputs(k)).unflatten(0, (-1, n))
    if layout.endswith("gated"):
        half = words.new_zeros((len(words), 2, rows // 2, words.shape[-1]))
        half[:, :, : n // 2] = words.unflatten(1, (2, n // 2))
        words = half.unflatten(2, (-1, GATE_ROWS[kind])).transpose(1, 2)
    elif rows > n:
        words = torch.cat([words, words.new_zeros((len(words), rows - n, words.shape[-1]))], 1)
    ordered = words.reshape(_sizes(plan, kind)).permute(_ORDER[VALUE_BYTES[kind]]).contiguous()
    data = ordered.view(torch.uint8)
    if layout.startswith("experts"):
        return data.view(len(values), plan.passes, -1)
    return data.view(plan.passes, plan.steps, plan.ctas, -1)


def untile(weight: Linear, processors: int) -> Tensor:
    """The inverse of `tile`: values [n, k], of experts [E * n, k], in the weight's dtype."""
    plan, n = schedule_of(weight, processors), weight.n
    rows = plan.ctas * plan.passes * plan.tiles * TILE
    order, sizes = _ORDER[VALUE_BYTES[weight.kind]], _sizes(plan, weight.kind)
    blocks = weight.data.view(torch.int32).view([sizes[axis] for axis in order])
    words = blocks.permute([order.index(axis) for axis in range(len(order))])
    words = words.reshape(-1, rows, padded_inputs(weight.k) * VALUE_BYTES[weight.kind] // 4)
    if weight.layout.endswith("gated"):
        halves = words.unflatten(1, (-1, 2, GATE_ROWS[weight.kind])).transpose(1, 2)
        words = halves.reshape(len(words), 2, rows // 2, -1)[:, :, : n // 2].flatten(1, 2)
    dtype = torch.bfloat16 if weight.kind == "bf16" else torch.float8_e4m3fn
    return words[:, :n].flatten(0, 1).contiguous().view(dtype)[:, : weight.k]


# Axes of a padded weight as int32 words. Rows: 0 pass (of all experts), 1 CTA, 2 row group, 3 tile
# of the warp, 4 half of 8, 5 row. Inputs: 6 step, 7 k group, 8 depth, then by bytes of a value: (1)
# 9 lane, 10 word (4 inputs); (2) 9 lane, 10 step of 16, 11 pair (2 inputs).
_ORDER = {
    1: (0, 6, 1, 7, 2, 8, 3, 5, 9, 10, 4),
    2: (0, 6, 1, 7, 2, 8, 3, 10, 5, 9, 11, 4),
}


def _sizes(plan: Schedule, kind: str) -> tuple[int, ...]:
    rows = (-1, plan.ctas, plan.row_groups, plan.wide, 2, 8)
    inputs = (plan.steps, plan.k_groups, plan.depth)
    return rows + inputs + ((4, 2, 2) if kind == "bf16" else (4, 2))


def _words(values: Tensor, padded: int) -> Tensor:
    """[n, padded k] as int32 words."""
    raw = values.contiguous().view(torch.uint8)
    size = values.element_size()
    if padded != values.shape[1]:
        raw = torch.nn.functional.pad(raw, (0, (padded - values.shape[1]) * size))
    return raw.contiguous().view(torch.int32)
