"""Weights of 4 bits as the kernels multiply them: codes, and a float16 scale for each 32 inputs.

A value is (code - zero) * scale * row, where row is a power of two. The difference is exact in
float16; so is its product with the scale where that has no more bits than a bfloat16 and zero is 8,
as in symmetric files. What wide groups share is repeated for each 32 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from targets.stored import Groups, Stored

GROUP = 32
"""Inputs that share a scale in memory."""
MIDDLE = 8
"""The code that stands for 0 where there are no zero points."""
SHRINKAGES = tuple(1 - step / 50 for step in range(21))
"""What is tried as a group's scale on load, in parts of that which fits its largest value."""
AT_ONCE = 1 << 26
"""Values that are rounded at once: the trials take several times their memory."""
TOP = 11
"""Scales are below 2 ** TOP: products then stay below float16's end, and scales of up to 2 ** 24
times less are still exact."""


@dataclass(frozen=True)
class Int4:
    """codes [..., n, k] uint8, 0 to 15; scale [..., n, k / 32 rounded up] float16; zero alike,
    uint8, or None: 8 everywhere; row [..., n] float32, of experts all the same."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    row: Tensor

    @property
    def kind(self) -> str:
        """int4, or with zero points uint4."""
        return "int4" if self.zero is None else "uint4"

    def values(self) -> Tensor:
        """[..., n, k] float16, without `row`: what meets an input, to the bit."""
        inner = self.codes.shape[-1]
        spread = lambda part: part.repeat_interleave(GROUP, -1)[..., :inner]  # noqa: E731
        zero = MIDDLE if self.zero is None else spread(self.zero).half()
        return (self.codes.half() - zero) * spread(self.scale)


def from_stored(stored: Stored, values: Tensor) -> Int4 | None:
    """values: its own bytes, on the device. None where the kernels have no form for it: another
    code, or groups that no 32 inputs share."""
    if stored.code != "int4":
        return None
    inner = 2 * values.shape[-1]
    one = np.ones((*values.shape[:-1], 1), np.float32)
    groups = stored.groups or Groups(one, inner)
    if groups.size % GROUP and groups.size < inner:
        return None
    blocks = -(-inner // GROUP)

    def by_block(part: np.ndarray) -> Tensor:
        there = torch.from_numpy(part.astype(np.float32)).to(values.device)
        return there.repeat_interleave(-(-groups.size // GROUP), -1)[..., :blocks]

    scale = by_block(groups.scale)
    if stored.scale is not None:
        scale = scale * torch.from_numpy(stored.scale).to(values.device)[..., None]
    zero = None if groups.zero is None else (by_block(groups.zero) + MIDDLE).to(torch.uint8)
    codes = torch.stack([values & 15, values >> 4], -1).flatten(-2)
    return Int4(codes, *_normalised(scale, zero))


def quantise(values: Tensor) -> Int4:
    """[..., n, k] -> symmetric by groups, each with the bfloat16 scale of the least squared error;
    of an odd width the last group is filled up with zeros."""
    flat = values.flatten(0, -2)
    rows = max(1, AT_ONCE // flat.shape[-1])
    codes, scales = zip(*map(_rounded, flat.split(rows)), strict=True)
    scale, row = _in_rows(torch.cat(scales))
    shape = values.shape[:-1]
    parts = (part.unflatten(0, shape) for part in (torch.cat(codes), scale, row))
    codes_, scale, row = parts
    return Int4(codes_, scale, None, row)


def joined(parts: list[Int4]) -> Int4:
    """Below each other."""
    if len(parts) == 1:
        return parts[0]
    if any(part.zero is not None for part in parts):
        parts = [part if part.zero is not None else _with_zeros(part) for part in parts]
    zeros = [part.zero for part in parts if part.zero is not None]
    return Int4(
        torch.cat([part.codes for part in parts], -2),
        torch.cat([part.scale for part in parts], -2),
        torch.cat(zeros, -2) if zeros else None,
        torch.cat([part.row for part in parts], -1),
    )


def _with_zeros(weight: Int4) -> Int4:
    return replace(weight, zero=torch.full_like(weight.scale, MIDDLE, dtype=torch.uint8))


def _normalised(scale: Tensor, zero: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    narrow, row = _in_rows(scale)
    return narrow, zero, row


def _in_rows(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Scales [..., n, groups] float32 as float16, and the power of two [..., n] they are of."""
    exponent = torch.frexp(scale.abs().max().clamp(min=1e-30)).exponent
    row = torch.ldexp(torch.ones_like(scale[..., 0]), exponent - TOP)
    return (scale / row[..., None]).half(), row


def _rounded(values: Tensor) -> tuple[Tensor, Tensor]:
    """[n, k] -> codes [n, k], and scales [n, groups] float32."""
    inner = values.shape[-1]
    padded = torch.nn.functional.pad(values.float(), (0, -inner % GROUP))
    parts = padded.unflatten(-1, (-1, GROUP))
    fits = parts.abs().amax(-1).clamp(min=1e-12) / 7
    best, least = fits, torch.full_like(fits, torch.inf)
    for part in SHRINKAGES:
        scale = (fits * part).bfloat16().float()
        error = (_nearest(parts, scale) * scale[..., None] - parts).square_().sum(-1)
        better = error < least
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    codes = (_nearest(parts, best) + MIDDLE).to(torch.uint8).flatten(-2)
    return codes[:, :inner].contiguous(), best


def _nearest(parts: Tensor, scale: Tensor) -> Tensor:
    return (parts / scale[..., None]).round_().clamp_(-8, 7)
