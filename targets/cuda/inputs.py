"""Inputs of linear layers as the kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from targets.cuda import tiles

BLOCKS = (1, 2, 4, 5, 8, 16, 32, 64, 128)
"""Tokens per CTA of the skinny GEMM; longer calls take several blocks. Five is for a token and four
guesses: padded to eight, there would be half as many inputs again."""
NARROW_BLOCKS = (8, 16, 32, 64, 128, 256)
"""The same for w8a8.cu; the last one not for row_parallel weights, which have a sum per k group."""


@dataclass(frozen=True)
class Input:
    """A linear layer's input [rows, k], in blocks: 16-bit words (`x_offset` in common.cuh), or e4m3
    (`narrow_offset` in narrow.cuh) with a scale [k_groups, rows]. k_groups: those of a row_parallel
    weight, by which its inputs are ordered or scaled; else 1."""

    data: Tensor
    rows: int
    block: int
    k_blocks: int
    k_groups: int = 1
    scale: Tensor | None = None


def block_of(rows: int, blocks: tuple[int, ...] = BLOCKS) -> int:
    """Tokens per block: as few blocks as can be; of few blocks, less padding than the last but one
    has."""
    if rows <= blocks[-1]:
        return next(block for block in blocks if rows <= block)
    few = rows <= 4 * blocks[-1]
    return blocks[-2] if few and -(-rows // blocks[-2]) % 2 else blocks[-1]


def make_input(
    rows: int, k: int, device: torch.device, groups: int = 1, block: int | None = None
) -> Input:
    """Room for an input, to be written by a kernel. block: if it is not what GEMMs read."""
    block = block or block_of(rows)
    k_blocks = tiles.padded_inputs(k, groups if groups > 1 else tiles.EIGHTHS) // tiles.INPUTS
    size = (-(-rows // block), k_blocks, block, tiles.INPUTS)
    return Input(_room(size, k, groups, torch.int16, device), rows, block, k_blocks, groups)


def make_rows(rows: int, k: int, device: torch.device) -> Input:
    """Room for plain rows [rows, k] of f16, which no linear layer reads: in blocks of 0."""
    data = torch.empty((rows, k), dtype=torch.float16, device=device)
    return Input(data, rows, 0, 0)


def make_narrow_input(rows: int, k: int, device: torch.device, groups: int = 1) -> Input:
    """Room for one of w8a8.cu."""
    block = block_of(rows, NARROW_BLOCKS if groups == 1 else NARROW_BLOCKS[:-1])
    k_blocks = tiles.padded_inputs(k) // tiles.INPUTS
    size = (-(-rows // block), k_blocks, block, tiles.INPUTS)
    data = _room(size, k, groups, torch.uint8, device)
    scale = torch.empty((groups, rows), device=device)
    return Input(data, rows, block, k_blocks, groups, scale)


_padded: dict[tuple[object, ...], Tensor] = {}
"""Inputs of row_parallel weights with padding at the end of k."""


def _room(
    size: tuple[int, ...], k: int, groups: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Memory of an input. Padding of k is multiplied by weights of zero, and must not be NaN: it is
    zeroed. Where only the next kernel reads the input, this happens once, because nothing writes
    there and zeroing is a launch of its own."""
    if k == size[1] * tiles.INPUTS:
        return torch.empty(size, dtype=dtype, device=device)
    key = size, k, groups, dtype, device
    if groups > 1 and key in _padded:
        return _padded[key]
    zeros = torch.zeros(size, dtype=dtype, device=device)
    if groups > 1 and not torch.cuda.is_current_stream_capturing():
        _padded[key] = zeros  # a graph's own memory is zero only once that graph has run
    return zeros
