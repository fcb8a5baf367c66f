"""NVFP4 weights as the kernels multiply them: e2m1 codes, and an e4m3 scale for each 16 inputs.

Both are kept as the file has them. A value is what its code means, times its scale / 2 ** 14: of
any code and scale that is a float16 to the bit, for it has six bits at most, none of them below
float16's last. The scale of the whole tensor is in `row`, which sums are multiplied by.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from targets.cuda.upload import as_tensor, upload
from targets.stored import NIBBLES, Stored

GROUP = 16
"""Inputs that share a scale."""
LOWERED = 14
"""A code's magnitude, read as the last bits of a float16's exponent and the first of its mantissa,
is 2 ** LOWERED times less than it means (kernels/tile.cuh)."""
SIGNS_AND_MAGNITUDES = 0x8E008E00
"""Where two codes stand in two float16s."""


@dataclass(frozen=True)
class Nvfp4:
    """codes [..., n, k] uint8, 0 to 15; scale [..., n, k / 16] e4m3; row [..., n] float32."""

    codes: Tensor
    scale: Tensor
    row: Tensor
    kind: str = "nvfp4"
    zero: None = None

    def values(self) -> Tensor:
        """[..., n, k] float16, without `row`: what meets an input, to the bit."""
        meant = torch.from_numpy(NIBBLES["e2m1"].astype(np.float32) / 2**LOWERED).half()
        scale = self.scale.half().repeat_interleave(GROUP, -1)
        return meant.to(self.codes.device)[self.codes.int()] * scale


def from_stored(stored: Stored, values: Tensor) -> Nvfp4:
    """From a stored e2m1 weight. values: its bytes, on the device."""
    assert stored.groups is not None and stored.groups.size == GROUP and stored.scale is not None
    scale = upload(as_tensor(stored.groups.scale), str(values.device))
    row = torch.from_numpy(stored.scale).to(values.device)
    codes = torch.stack([values & 15, values >> 4], -1).flatten(-2)
    return Nvfp4(codes, scale, row * 2**LOWERED)


def joined(parts: list[Nvfp4]) -> Nvfp4:
    """Below each other."""
    return Nvfp4(
        torch.cat([part.codes for part in parts], -2),
        torch.cat([part.scale for part in parts], -2),
        torch.cat([part.row for part in parts], -1),
    )


def codes_of(word: int) -> int:
    """Eight codes, 4 bits each, the first lowest, of the word that keeps them: tile.cuh's `decode`.

    In a float16 three bits lie between a code's sign and its magnitude. No four shifts of such a
    pattern fill 16 bits, so the bits of the last four codes are where two shifts differ.
    """
    pairs = word << 6, word << 9, word ^ word << 2, word ^ word >> 3
    halves = [pair & SIGNS_AND_MAGNITUDES for pair in pairs]
    halves = [half >> shift & 0xFFFF for half in halves for shift in (0, 16)]
    return sum((half >> 12 | half >> 9 & 7) << 4 * i for i, half in enumerate(halves))


def _words() -> list[int]:
    """The word for each bit of eight codes: the inverse of `codes_of`, in which each bit is a
    difference (XOR) of bits, by Gaussian elimination."""
    rows = [(codes_of(1 << i), 1 << i) for i in range(32)]
    for bit in range(32):
        at = next(i for i in range(bit, 32) if rows[i][0] >> bit & 1)
        rows[bit], rows[at] = rows[at], rows[bit]
        codes, word = rows[bit]
        for i, (others, its) in enumerate(rows):
            if i != bit and others >> bit & 1:
                rows[i] = others ^ codes, its ^ word
    return [word for _, word in rows]


@cache
def parts_of_words() -> Tensor:
    """int32 [8, 16]: what each code of each of eight inputs brings to their word, by XOR."""
    words = torch.tensor(_words()).view(8, 4)
    parts = torch.zeros((8, 16), dtype=torch.int64)
    for bit in range(4):
        has = torch.arange(16) >> bit & 1
        parts ^= words[:, bit, None] * has
    return parts.int()
