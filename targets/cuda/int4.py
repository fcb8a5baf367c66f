"""Weights of 4 bits as the kernels multiply them: codes, and a float16 scale for each 32 inputs.

A value is (code - zero) * scale / 2 ** 20 as a float16, times `row`, a power of two. Nothing is
rounded where a scale has no more bits than a bfloat16, zero is 8 as in symmetric files, and the
scale is no less than 1 / 256 of the row's largest (or of all experts'); else it is float16's last
bit. What wide groups share is repeated for each 32 inputs.
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
SCALE_TOP = 11
"""Stored scales are below 2 ** SCALE_TOP, so that sixteen times as much is a float16 too."""
SCALE_SHIFT = 20
"""Stored scales are 2 ** SCALE_SHIFT times the real ones: codes are the last bits of float16s, and
so much less (kernels/tile.cuh)."""


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

        def spread(part: Tensor) -> Tensor:
            return part.repeat_interleave(GROUP, -1)[..., :inner]

        scale = spread(self.scale).float() / 2**SCALE_SHIFT
        if self.zero is None:  # multiplied and added at once
            return (self.codes * scale - spread(self._middle).float()).half()
        return ((self.codes.float() - spread(self.zero)) * scale).half()

    @property
    def _middle(self) -> Tensor:
        """What the code 8 of a group is."""
        return self.scale * (MIDDLE / 2**SCALE_SHIFT)


def from_stored(stored: Stored, values: Tensor) -> Int4 | None:
    """From a stored int4 weight. values: its bytes, on the device. None if there are groups that
    don't have a multiple of 32 inputs."""
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
    narrow, row = _in_rows(scale)
    return Int4(codes, narrow, zero, row)


def quantise(values: Tensor) -> Int4:
    """[..., n, k] -> symmetric by groups, each with the bfloat16 scale of the least squared error;
    of an odd width the last group is filled up with zeros."""
    flat = values.flatten(0, -2)
    rows = max(1, AT_ONCE // flat.shape[-1])
    codes, scales = zip(*map(_rounded, flat.split(rows)), strict=True)
    shape = values.shape[:-1]
    scale, row = _in_rows(torch.cat(scales).unflatten(0, shape))
    return Int4(torch.cat(codes).unflatten(0, shape), scale, None, row)


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


def _in_rows(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Scales [..., n, groups] float32 as float16, and the power of two [..., n] they are of."""
    largest = scale.abs().amax(-1) if scale.ndim == 2 else scale.abs().max()
    exponent = torch.frexp(largest.clamp(min=1e-30)).exponent
    one = torch.ones_like(scale[..., 0])
    raised = scale / torch.ldexp(one, exponent - SCALE_TOP)[..., None]
    return raised.half(), torch.ldexp(one, exponent - SCALE_TOP + SCALE_SHIFT)


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
