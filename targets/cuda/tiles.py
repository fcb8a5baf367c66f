"""Weights in the order in which `kernels/gemm.cu` reads them.

A tile is 16 rows; every CTA owns equally many and walks all inputs in steps. Memory holds every
CTA's first step, then every CTA's second, and so on, so that the whole GPU reads one stretch at a
time; within a step, warp by warp in the tensor cores' fragment order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count

import torch
from torch import Tensor

from targets.cuda.four_bits import FourBits
from targets.cuda.int8 import Int8, Int16
from targets.cuda.launch import Variant
from targets.cuda.nvfp4 import parts_of_words
from targets.cuda.ops import Linear

TILE = 16
INPUTS = 32
"""Inputs of one block: a tile of a block is what a warp loads at once."""
EIGHTHS = 8
"""Most k groups of a weight."""
BITS = {"bf16": 16, "fp8": 8, "w8a8": 8, "int8": 8, "int16": 8, "int4": 4, "uint4": 4, "nvfp4": 4}
"""Of a stored value; of int16, of each of its parts."""
TILE_BYTES = {"bf16": 1024, "fp8": 512, "w8a8": 512, "int8": 544, "int16": 544 + 512}
TILE_BYTES |= {"int4": 288, "uint4": 304, "nvfp4": 288}
"""With the scales of codes, and zero points (kernels/tile.cuh)."""
VALUE_BYTES = {"bf16": 2, "fp8": 1, "w8a8": 1, "int4": 2, "uint4": 2, "nvfp4": 2}
"""Of a value in plain order: float16 of 4-bit ones."""
NIBBLES = (0, 16, 4, 20, 8, 24, 12, 28)
"""Where the codes of eight inputs stand in a word: pairs in its halves, as MMAs want them. Those of
NVFP4 are mixed (nvfp4.py)."""
SCALES = {"nvfp4": 2}
"""Of a row of a tile of codes, where there is more than one."""
WARPS = {1: 24, 2: 11, 3: 8}
"""By tiles per warp, preferred first: the most warps of a CTA (gemm.cu adds a producer, and wide.cu
takes two tiles a warp). Many narrow warps catch up faster with a ring that was filled while the
kernel before still ran: 1 % of a cycle."""
NARROW_WARPS = {2: 11, 3: 8, 1: 11}
"""The same of w8a8 weights, whose tiles w8a8.cu gives to its warps itself."""
HEAD_WARPS = {3: 6, 2: 5, 1: 12}
"""The same of a head (int16): where its codes alone are read, each warp turns inputs into f16. No
more than with which two steps of four blocks fit beside the inputs of 128 tokens."""
STEP_BYTES = {"bf16": 24 << 10, "fp8": 24 << 10, "int16": 75 << 10, "int4": 28 << 10}
BLOCKS = {"bf16": 16, "fp8": 16, "int16": 16, "int4": 32}
"""Of a step: its weights' bytes and blocks of inputs at most. Two steps must fit, whose inputs of
16 tokens are 1 KiB a block. Steps of 4 bits are fewer bytes, and cost no less."""
BLOCK_AXES = 9
"""Axes of `_axes` that say which tile, and which of its rows."""
DEPTHS = (1, 2, 3, 4)
"""Blocks of inputs per warp and step. kernels/gemm.cu has a loop for each."""
GATE_ROWS = {"gated": TILE // 2, "experts_gated": TILE}
"""Rows of gate that stand together, before as many of up: in one tile, of whose halves a thread has
both, or in a tile of each (moe.cu)."""
GROUPS = ((3 * 132, 8), (4 * 132, 4), (10 * 132, 2))
"""k groups of weights of up to so many tiles: as many as there are warps for where a Hopper GPU of
132 multiprocessors shares the tiles. Other machines take the same: they are part of the sums."""
ACTIVATION_SCALE = 32.0
"""Inputs of e4m3 weights travel divided by this (kernels/common.cuh)."""


@dataclass(frozen=True)
class Schedule:
    """How a weight is dealt. Of these numbers only `k_groups` is seen in any sum.

    ctas x passes x tiles cover the rows; k_groups x steps x depth blocks cover the inputs. A CTA's
    warps are row_groups (of `wide` tiles each) x k_groups.
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


def k_groups(n: int, layout: str) -> int:
    """Of a weight of n rows: into how many parts its k is cut, whose sums are added as a binary
    tree. n counts all rows, wherever they are kept, so that no cut of the rows changes a sum. What
    is cut along k (row_parallel) has eight parts, which 2, 4 or 8 devices share evenly."""
    if layout == "row_parallel" or layout.startswith("experts"):
        return EIGHTHS
    tiles = _tiles(n, layout)
    return next((groups for most, groups in GROUPS if tiles <= most), 1)


def k_stride(weight: Linear) -> int:
    """From one block of a k group to its next. Contiguous groups are for what is cut along k;
    others lie side by side, so that a step of all groups is a contiguous part of the inputs."""
    return 1 if weight.layout == "row_parallel" else weight.k_groups


def padded_inputs(k: int, groups: int = EIGHTHS) -> int:
    """k as it is stored: k groups of whole blocks. Inputs are padded for any weight."""
    return -(-k // (groups * INPUTS)) * groups * INPUTS


@cache
def schedule(n: int, k: int, kind: str, layout: str, groups: int, processors: int) -> Schedule:
    """n rows (of both halves where gated) by k inputs on this many multiprocessors."""
    tiles = _tiles(n, layout)
    warps = {"w8a8": NARROW_WARPS, "int16": HEAD_WARPS}.get(kind, WARPS)
    passes, each, wide = next(_deals(tiles, groups, processors, warps))
    row_groups = each // wide
    blocks = padded_inputs(k, groups) // INPUTS
    step = row_groups * groups * wide * TILE_BYTES[kind]
    depths = [d for d in DEPTHS if blocks % (d * groups) == 0]
    if kind != "w8a8":  # w8a8.cu has one k group in a step
        form = "int4" if BITS[kind] == 4 else kind
        depths = [d for d in depths if d * groups <= BLOCKS[form] and d * step <= STEP_BYTES[form]]
    depth = max(depths, default=1)
    ctas = -(-tiles // (each * passes))
    return Schedule(ctas, passes, each, wide, row_groups, groups, depth, blocks // (groups * depth))


def _tiles(n: int, layout: str) -> int:
    half = GATE_ROWS.get(layout)
    return -(-n // TILE) if half is None else -(-(n // 2) // half) * 2 * half // TILE


def _deals(
    tiles: int, groups: int, processors: int, warps: dict[int, int]
) -> Iterator[tuple[int, int, int]]:
    """Passes, tiles of a CTA and pass, tiles of a warp; the fewest passes first."""
    for passes in count(1):
        least = -(-tiles // (processors * passes))
        deals = ((-(-least // wide) * wide, wide) for wide in warps)
        fit = [(each, wide) for each, wide in deals if each // wide * groups <= warps[wide]]
        if fit:
            yield passes, *min(fit, key=lambda deal: deal[0])


def weight_variant(file: str, kind: str, *macros: tuple[str, int]) -> Variant:
    """Of a kernel that reads tiles of this kind (kernels/tile.cuh)."""
    form = {"uint4": "ZEROS", "nvfp4": "E2M1", "int8": "CODES", "int16": "FINE"}
    more = [(form[kind], 1)] if kind in form else []
    return Variant(file, (("BITS", BITS[kind]), *more, *macros))


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
        depth=expert_inputs(k) // INPUTS,
        steps=1,
    )


def expert_inputs(k: int) -> int:
    """k of an expert as it is stored."""
    return padded_inputs(k, 2)


def schedule_of(weight: Linear, processors: int) -> Schedule:
    kind = weight.dealt or weight.kind
    return _plan(weight.n, weight.k, kind, weight.layout, weight.k_groups, processors)


def _plan(n: int, k: int, kind: str, layout: str, groups: int, processors: int) -> Schedule:
    if layout.startswith("experts"):
        return expert_schedule(n, k, layout.endswith("gated"))
    return schedule(n, k, kind, layout, groups, processors)


def tile(values: Tensor, kind: str, layout: str, groups: int, processors: int) -> Tensor:
    """values [n, k] -> bytes [passes, steps, ctas, step bytes]; of experts [E, n, k] ->
    [E, units, unit bytes]. gated: gate's rows, then up's; they alternate (`GATE_ROWS`), so that one
    warp holds both of a feature."""
    n, k = values.shape[-2:]
    plan = _plan(n, k, kind, layout, groups, processors)
    words = _words(values.reshape(-1, k), _stored(plan)).unflatten(0, (-1, n))
    data = _dealt(words, plan, layout, *_axes(plan, kind, layout))
    return _shaped(data, plan, layout, len(words))


def form_of(weight: Linear) -> str:
    """The kind as which a GEMM reads its tiles."""
    return "int16" if weight.dealt == "int16" and weight.kind == "bf16" else weight.kind


def tile_head(head: Int16, processors: int) -> Tensor:
    """The same of a head: of a CTA's step all codes with their scales, then all 256ths. It has one
    k group, so that a step's codes are one piece."""
    codes = tile_codes(head.narrow, "plain", 1, processors, "int16")
    return torch.cat([codes, tile(head.fine, "int16", "plain", 1, processors)], -1)


def tile_codes(
    weight: FourBits | Int8, layout: str, groups: int, processors: int, dealt: str | None = None
) -> Tensor:
    """The same of codes: a tile's codes, then its scales, then its zero points. dealt: as another
    kind."""
    n, k = weight.codes.shape[-2:]
    plan = _plan(n, k, dealt or weight.kind, layout, groups, processors)
    sizes, order = _axes(plan, weight.kind, layout)
    codes = weight.codes.reshape(-1, n, k)
    words = _words(codes, _stored(plan))
    if BITS[weight.kind] == 4:
        words = _code_words(codes, weight.kind, _stored(plan))
    parts = [_dealt(words, plan, layout, sizes, order)]
    each = SCALES.get(weight.kind, 1)
    of_scales = (*sizes[:BLOCK_AXES], each), tuple(axis for axis in order if axis <= BLOCK_AXES)
    for part in (weight.scale, weight.zero):
        if part is not None:
            raw = part.view(torch.uint8) if part.dtype.itemsize == 1 else part
            padded = _filled(raw.reshape(-1, *part.shape[-2:]), _stored(plan) // INPUTS * each)
            parts.append(_dealt(padded, plan, layout, *of_scales))
    bytes_of = TILE * INPUTS * BITS[weight.kind] // 8, 2 * TILE, TILE
    tiles = [part.view(-1, size) for part, size in zip(parts, bytes_of, strict=False)]
    return _shaped(torch.cat(tiles, -1), plan, layout, len(codes))


def _dealt(
    matrix: Tensor, plan: Schedule, layout: str, sizes: tuple[int, ...], order: tuple[int, ...]
) -> Tensor:
    """[weights, n, columns] with rows filled up and those of gate and up by turns, in the order of
    memory, as bytes."""
    n, rows = matrix.shape[1], plan.ctas * plan.passes * plan.tiles * TILE
    if layout in GATE_ROWS:
        half = matrix.new_zeros((len(matrix), 2, rows // 2, matrix.shape[-1]))
        half[:, :, : n // 2] = matrix.unflatten(1, (2, n // 2))
        matrix = half.unflatten(2, (-1, GATE_ROWS[layout])).transpose(1, 2)
    elif rows > n:
        matrix = torch.cat([matrix, matrix.new_zeros((len(matrix), rows - n, matrix.shape[-1]))], 1)
    return matrix.reshape(sizes).permute(order).contiguous().view(torch.uint8)


def _shaped(data: Tensor, plan: Schedule, layout: str, experts: int) -> Tensor:
    if layout.startswith("experts"):
        return data.view(experts, plan.passes, -1)
    return data.view(plan.passes, plan.steps, plan.ctas, -1)


def untile(weight: Linear, processors: int) -> Tensor:
    """The inverse of `tile`: values [n, k], of experts [E * n, k], in the weight's dtype."""
    plan, n = schedule_of(weight, processors), weight.n
    rows = plan.ctas * plan.passes * plan.tiles * TILE
    sizes, order = _axes(plan, weight.kind, weight.layout)
    blocks = weight.data.view(torch.int32).view([sizes[axis] for axis in order])
    words = blocks.permute([order.index(axis) for axis in range(len(order))])
    words = words.reshape(-1, rows, _stored(plan) * VALUE_BYTES[weight.kind] // 4)
    if weight.layout in GATE_ROWS:
        halves = words.unflatten(1, (-1, 2, GATE_ROWS[weight.layout])).transpose(1, 2)
        words = halves.reshape(len(words), 2, rows // 2, -1)[:, :, : n // 2].flatten(1, 2)
    dtype = torch.bfloat16 if weight.kind == "bf16" else torch.float8_e4m3fn
    return words[:, :n].flatten(0, 1).contiguous().view(dtype)[:, : weight.k]


def _axes(plan: Schedule, kind: str, layout: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of a padded weight as int32 words, and the order of its axes in memory.

    Rows: 0 pass (of all experts), 1 CTA, 2 row group, 3 tile of the warp, 4 half of 8, 5 row.
    Inputs: 6, 7, 8 k group, step and depth, or step, depth and k group (`k_stride`); then by bytes
    of a value: (1) 9 lane, 10 word (4 inputs); (2) 9 lane, 10 step of 16, 11 pair (2 inputs);
    of 4 bits 9 lane (a word of 8 inputs)."""
    contiguous = layout == "row_parallel"
    group, step, depth = (6, 7, 8) if contiguous else (8, 6, 7)
    blocks = (plan.k_groups, plan.steps, plan.depth)
    blocks = blocks if contiguous else blocks[1:] + blocks[:1]
    rows = (-1, plan.ctas, plan.row_groups, plan.wide, 2, 8)
    order = (0, step, 1, group, 2, depth, 3)
    if kind == "bf16":
        return rows + blocks + (4, 2, 2), order + (10, 5, 9, 11, 4)
    if BITS[kind] == 4:
        return rows + blocks + (4,), order + (5, 9, 4)
    return rows + blocks + (4, 2), order + (5, 9, 10, 4)


def _stored(plan: Schedule) -> int:
    return plan.k_groups * plan.steps * plan.depth * INPUTS


def _words(values: Tensor, padded: int) -> Tensor:
    """[..., n, padded k] as int32 words."""
    raw = values.contiguous().view(torch.uint8)
    size = values.element_size()
    if padded != values.shape[-1]:
        raw = torch.nn.functional.pad(raw, (0, (padded - values.shape[-1]) * size))
    return raw.contiguous().view(torch.int32)


def _code_words(codes: Tensor, kind: str, padded: int) -> Tensor:
    """codes [weights, n, k] -> int32 words [weights, n, padded / 8]."""
    codes = _filled(codes, padded)
    words = torch.zeros_like(codes[..., ::8], dtype=torch.int32)
    parts = parts_of_words().to(codes.device) if kind == "nvfp4" else None
    for i, place in enumerate(NIBBLES):
        each = codes[..., i::8].int()
        words ^= each << place if parts is None else parts[i][each]
    return words


def _filled(matrix: Tensor, columns: int) -> Tensor:
    return torch.nn.functional.pad(matrix, (0, columns - matrix.shape[-1]))
