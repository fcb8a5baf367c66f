"""Weights of every kind on the CPU, for kernels that are emulated."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from targets.cuda import int4
from targets.cuda.four_bits import FourBits
from targets.cuda.gemm import Gemm
from targets.cuda.int4 import Int4
from targets.cuda.nvfp4 import GROUP, Nvfp4
from targets.cuda.ops import Linear
from targets.cuda.reader import quantise_fp8
from tests.targets.cuda import card
from tests.targets.cuda.nvfp4_files import as_nvfp4

KINDS = [
    "int4",
    "fp8",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("uint4", "nvfp4", "bf16")),
]


@dataclass(frozen=True)
class Weight:
    """Its rounded values [..., n, k], and as codes or values with a scale, as it is packed."""

    meant: torch.Tensor
    kind: str
    codes: FourBits | None = None
    values: torch.Tensor | None = None
    scale: torch.Tensor | None = None

    def packed(self, linear: Gemm, layout: str, groups: int | None = None) -> Linear:
        if self.codes is not None:
            return linear.pack_codes(self.codes, layout, groups)
        assert self.values is not None
        return linear.pack(self.values, self.scale, self.kind, layout, groups)

    def cut(self, first: int, width: int) -> Weight:
        """Inputs `first` to `first + width`, zeros where there are none."""

        def part(t, size=1):
            return _cut(t, first // size, width // size)

        codes, values = self.codes, None if self.values is None else part(self.values)
        if isinstance(codes, Int4):
            zero = None if codes.zero is None else part(codes.zero, int4.GROUP)
            scale = part(codes.scale, int4.GROUP)
            codes = replace(codes, codes=part(codes.codes), scale=scale, zero=zero)
        elif isinstance(codes, Nvfp4):
            codes = replace(codes, codes=part(codes.codes), scale=part(codes.scale, GROUP))
        return replace(self, meant=part(self.meant), codes=codes, values=values)


def _cut(matrix: torch.Tensor, first: int, width: int) -> torch.Tensor:
    raw = matrix.view(torch.uint8) if matrix.dtype.itemsize == 1 else matrix
    cut = raw[..., first : first + width]
    return F.pad(cut, (0, width - cut.shape[-1])).contiguous().view(matrix.dtype)


def randn(*shape: int, seed: int) -> torch.Tensor:
    return card.randn(*shape, seed=seed, device="cpu")


def drawn(shape: tuple[int, ...], kind: str, seed: int) -> Weight:
    values = randn(*shape, seed=seed).bfloat16() * shape[-1] ** -0.5
    if kind == "bf16":
        return Weight(values.float(), kind, values=values)
    if kind == "fp8":
        narrow, scale = quantise_fp8(values)
        return Weight(narrow.float() * scale[..., None], kind, values=narrow, scale=scale)
    codes = as_nvfp4(values) if kind == "nvfp4" else int4.quantise(values)
    if isinstance(codes, Int4) and kind == "uint4":
        draw = torch.Generator().manual_seed(seed)
        zero = torch.randint(6, 11, codes.scale.shape, generator=draw, dtype=torch.uint8)
        codes = replace(codes, zero=zero)
    return Weight(codes.values().float() * codes.row[..., None], kind, codes)
