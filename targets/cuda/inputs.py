"""Inputs of linear layers as the kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from targets.cuda import tiles

BLOCKS = (8, 16, 32, 64, 128)
"""Tokens per CTA of the skinny GEMM; longer calls take several blocks."""


@dataclass(frozen=True)
class Input:
    """A linear layer's input [rows, k] as 16-bit words, blocked (`x_offset` in common.cuh)."""

    data: torch.Tensor
    rows: int
    block: int
    k_blocks: int


def block_of(rows: int) -> int:
    """Tokens per block: as few blocks as can be, and no more than 63 tokens of padding."""
    if rows <= BLOCKS[-1]:
        return next(block for block in BLOCKS if rows <= block)
    return BLOCKS[-1] if -(-rows // BLOCKS[-2]) % 2 == 0 else BLOCKS[-2]


def make_input(rows: int, k: int, device: torch.device) -> Input:
    """Room for an input, to be written by a kernel."""
    block = block_of(rows)
    k_blocks = tiles.padded_inputs(k) // tiles.INPUTS
    size = (-(-rows // block), k_blocks, block, tiles.INPUTS)
    # inputs that only pad k meet weights of zero, and must not be NaN
    make = torch.empty if k % tiles.INPUT_ALIGN == 0 else torch.zeros
    return Input(make(size, dtype=torch.int16, device=device), rows, block, k_blocks)
