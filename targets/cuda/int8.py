"""A head in two parts of 8 bits (certified.py): codes with a float16 scale for each 32 inputs,
which give its logits within bounds, and 256ths of a code, which together with the codes are the
head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from targets.cuda.int4 import GROUP

MIDDLE = 128
"""The code of 0."""
LARGEST = 127
"""Codes go this far to either side of MIDDLE."""
TOP = 5
"""Scales are below 2 ** TOP, times the row's power of two: 1,152 scales, which kernels subtract
from a code, are then a float16."""
SCALE_BITS = 7
"""Bits of a scale: 1,152 times it then needs no more than a float16's 11."""
UNIT = 2.0**-23
"""Largest error of one addition of the tensor cores, relative to the largest number in it: PTX
specifies float32's precision, but not the rounding."""
SAFETY = 1.002
"""Factor on bounds, for the rounding of the norms in them."""
FINER = 256
"""Parts of a code."""
WORDS = 4
"""Words that the kernels take together: a head with another number of words stays bf16,
uncertified."""
AT_ONCE = 1 << 26
"""Values that are rounded at once."""


@dataclass(frozen=True)
class Int8:
    """codes [n, k] uint8, of which 128 is 0; scale [n, k / 32 rounded up] float16; row [n]: a power
    of two. A value is (code - 128) * scale rounded to a float16, times `row`."""

    codes: Tensor
    scale: Tensor
    row: Tensor
    kind: str = "int8"
    zero: None = None

    def values(self) -> Tensor:
        """[n, k] float16, without `row`."""
        scale = self.scale.float().repeat_interleave(GROUP, -1)[:, : self.codes.shape[1]]
        return ((self.codes.float() - MIDDLE) * scale).half()


@dataclass(frozen=True)
class Int16:
    """narrow: codes, scales and rows' powers of two; fine [n, k] uint8: 256ths of a code, of which
    128 is 0. A value is their sum times the scale, rounded to a bfloat16, times `row`: the bfloat16
    that it was made from, but for some 0.5 % that are less than one code, which may be off by 2^-15
    of their group's largest."""

    narrow: Int8
    fine: Tensor

    def values(self) -> Tensor:
        """[n, k] bfloat16, without `row`."""
        own, k = self.narrow, self.fine.shape[1]
        whole = (own.codes.float() - MIDDLE) * FINER + (self.fine.float() - MIDDLE)
        scale = own.scale.float().repeat_interleave(GROUP, -1)[:, :k] / FINER
        return (whole * scale).bfloat16()

    def packed(self) -> Tensor:
        """Row by row as the references keep it: codes, scales as bytes, `fine`."""
        own = self.narrow
        return torch.cat([own.codes, own.scale.view(torch.uint8), self.fine], 1)

    @classmethod
    def unpacked(cls, data: Tensor, row: Tensor) -> Int16:
        groups = data.shape[1] // 2  # of k values and k / 32 scales each
        k = groups * GROUP // (GROUP + 1)
        scale = data[:, k:-k].contiguous().view(torch.float16)
        return cls(Int8(data[:, :k], scale, row), data[:, -k:])


def quantise(values: Tensor) -> tuple[Int16, Tensor]:
    """values [n, k] bfloat16 -> the head, and what logits of its `narrow` err by at most [n], per
    unit of `length`."""
    rows = max(1, AT_ONCE // values.shape[1])
    parts, bounds = zip(*map(_rounded, values.split(rows)), strict=True)
    codes, scales, powers = (
        torch.cat([getattr(p.narrow, f) for p in parts]) for f in ("codes", "scale", "row")
    )
    fine = torch.cat([part.fine for part in parts])
    return Int16(Int8(codes, scales, powers), fine), torch.cat(bounds)


def _rounded(values: Tensor) -> tuple[Int16, Tensor]:
    wide, k = values.float(), values.shape[1]
    groups = torch.nn.functional.pad(wide, (0, -k % GROUP)).unflatten(1, (-1, GROUP))
    fits = groups.abs().amax(-1) / LARGEST
    one = torch.ones_like(fits[:, 0])
    row = torch.ldexp(one, torch.frexp(fits.amax(-1).clamp(min=1e-30)).exponent - TOP)
    mantissa, exponent = torch.frexp(fits / row[:, None])
    few = (mantissa * 2**SCALE_BITS).ceil() / 2**SCALE_BITS
    scale = torch.ldexp(few, exponent).half()
    steps = (scale.float() * row[:, None])[..., None]
    most = LARGEST * FINER
    whole = (groups / steps.clamp(min=1e-38) * FINER).round().clamp(-most, most)
    codes = ((whole + FINER // 2) / FINER).floor()
    parts = (part + MIDDLE for part in (codes, whole - codes * FINER))
    codes, fine = (part.to(torch.uint8).flatten(1)[:, :k].contiguous() for part in parts)
    head = Int16(Int8(codes, scale, row), fine)
    return head, row * _bound(head.values().float(), head.narrow.values().float())


def _bound(values: Tensor, coarse: Tensor) -> Tensor:
    """A bound of |coarse x - values x|, both summed by tensor cores, for an x of length 1."""
    sums = (values.shape[1] + GROUP) * UNIT * (values.norm(dim=-1) + coarse.norm(dim=-1))
    return ((values - coarse).norm(dim=-1) + sums) * SAFETY
