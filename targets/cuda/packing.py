"""Weights in the order in which `kernels/gemm.cu` reads them.

Memory holds every CTA's first step, then every CTA's second, and so on, so that the whole GPU reads
one stretch at a time; within a step, warp by warp in the tensor cores' fragment order (tiles.py
assigns tiles to CTAs and warps).
"""

from __future__ import annotations

import torch
from torch import Tensor

from targets.cuda import tiles
from targets.cuda.four_bits import FourBits
from targets.cuda.int4 import MIDDLE
from targets.cuda.int8 import Int8, Int16
from targets.cuda.nvfp4 import parts_of_words
from targets.cuda.tiles import BITS, GATE_ROWS, INPUTS, INTEGERS, TILE, Schedule

NIBBLES = (0, 16, 4, 20, 8, 24, 12, 28)
"""Bit positions of eight inputs' codes in a word: pairs in its halves, as MMAs take them. NVFP4 has
another order (nvfp4.py)."""
SCALES = {"nvfp4": 2}
"""Scales per row of a tile of codes, where there is more than one."""
BLOCK_AXES = 9
"""Axes of `_axes` that select the tile and its row."""


def tile(values: Tensor, kind: str, layout: str, groups: int, processors: int) -> Tensor:
    """values [n, k] -> bytes [passes, steps, ctas, step bytes]; of experts [E, n, k] ->
    [E, units, unit bytes]. gated: gate's rows, then up's; they alternate (`GATE_ROWS`), so that one
    warp holds both of a feature."""
    n, k = values.shape[-2:]
    plan = tiles.plan(n, k, kind, layout, groups, processors)
    words = _words(values.reshape(-1, k), _stored(plan)).unflatten(0, (-1, n))
    data = _dealt(words, plan, layout, *_axes(plan, kind, layout))
    return _shaped(data, plan, layout, len(words))


def tile_head(head: Int16, processors: int) -> Tensor:
    """The same for a head: in each CTA's step, all codes with their scales, then all 256ths. It has
    one k group, so that a step's codes are one piece."""
    codes = tile_codes(head.narrow, "plain", 1, processors, "int16")
    return torch.cat([codes, tile(head.fine, "int16", "plain", 1, processors)], -1)


def tile_codes(
    weight: FourBits | Int8, layout: str, groups: int, processors: int, dealt: str | None = None
) -> Tensor:
    """The same for codes: a tile's codes, then its scales, then its zero points. For experts'
    integers without zero points, a unit's two tiles are packed as one, and 8 is subtracted from
    codes. dealt: the kind by which tiles are dealt, if another."""
    n, k = weight.codes.shape[-2:]
    plan = tiles.plan(n, k, dealt or weight.kind, layout, groups, processors)
    sizes, order = _axes(plan, weight.kind, layout)
    codes = weight.codes.reshape(-1, n, k)
    signed = weight.kind == INTEGERS and layout.startswith("experts")
    if signed:
        codes = codes ^ MIDDLE
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
    packed = [part.view(-1, size) for part, size in zip(parts, bytes_of, strict=False)]
    if signed:
        packed = [_paired(part, lanes) for part, lanes in zip(packed, (32, 8), strict=True)]
    return _shaped(torch.cat(packed, -1), plan, layout, len(codes))


def _paired(part: Tensor, pieces: int) -> Tensor:
    """[tiles, bytes] -> [units, bytes]: the pieces of an expert's two tiles by turns."""
    return part.view(-1, 2, pieces, part.shape[-1] // pieces).transpose(1, 2).flatten(1)


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
