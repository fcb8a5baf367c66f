"""What the tests on a GPU share: weights, linear layers' inputs and outputs in plain order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from targets.arch import Arch
from targets.cuda.formulas import as_e4m3
from targets.cuda.gemm import WIDE_FROM
from targets.cuda.inputs import Input, make_input, make_narrow_input
from targets.cuda.kernels import Kernels
from targets.cuda.ops import Linear
from targets.cuda.params import quantise_fp8
from targets.cuda.tiles import ACTIVATION_SCALE

KINDS = {"fp8", "w8a8", "bf16"}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda")


@dataclass(frozen=True)
class Weight:
    """As the kernels keep it, and its values and scale."""

    packed: Linear
    values: torch.Tensor
    scale: torch.Tensor | None

    def times(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, k] in float64 -> [M, n], a part at a time."""
        out = torch.cat([x @ part.double().T for part in self.values.split(16384)], 1)
        return out if self.scale is None else out * self.scale.double()


def random_weight(
    ops: Kernels, shape: tuple[int, ...], kind: str, layout: str = "plain", seed: int = 0
) -> Weight:
    values = randn(*shape, seed=seed).bfloat16().mul_(shape[-1] ** -0.5)
    values, scale = (values, None) if kind == "bf16" else quantise_fp8(values)
    return Weight(ops.pack(values, scale, kind, layout), values, scale)


def as_input(x: torch.Tensor, kind: str) -> Input:
    """x [M, k] in the layout and dtype that a weight of this kind reads."""
    m, k = x.shape
    if kind == "w8a8":
        return _narrow_input(x)
    made = make_input(m, k, x.device)
    blocks, _, block, _ = made.data.shape
    values = (x / ACTIVATION_SCALE).half() if kind == "fp8" else x.bfloat16()
    rows = values.new_zeros((blocks * block, made.k_blocks * 32))
    rows[:m, :k] = values
    data = rows.view(blocks, block, made.k_blocks, 32).transpose(1, 2)
    if block >= WIDE_FROM:  # pairs of features: [pair of 4, token, quad of 4, 2]
        data = data.unflatten(-1, (4, 4, 2)).permute(0, 1, 4, 2, 3, 5)
    return replace(made, data=data.contiguous().view(torch.int16).view(made.data.shape))


def _narrow_input(x: torch.Tensor) -> Input:
    values, scale = quantise_fp8(x)
    made = make_narrow_input(*x.shape, x.device)
    blocks, k_blocks, block, _ = made.data.shape
    rows = made.data.new_zeros((blocks * block, k_blocks * 32))
    rows[: len(x), : x.shape[1]] = values.view(torch.uint8)
    data = rows.view(blocks, block, k_blocks, 4, 2, 4).permute(0, 2, 4, 1, 3, 5)
    return replace(made, data=data.reshape(made.data.shape).contiguous(), scale=scale)


def rows_of(x: Input, k: int, kind: str) -> torch.Tensor:
    """[M, k]: the inverse."""
    if kind == "w8a8":
        assert x.scale is not None
        parts = x.data.view(*x.data.shape[:2], 2, x.block, 4, 4).permute(0, 3, 1, 4, 2, 5)
        rows = parts.reshape(-1, x.k_blocks * 32)[: x.rows, :k].contiguous()
        return rows.view(torch.float8_e4m3fn).float() * x.scale[:, None]
    data = x.data.view(torch.float16 if kind == "fp8" else torch.bfloat16)
    if x.block >= WIDE_FROM:
        parts = data.view(*data.shape[:2], 4, x.block, 4, 2)
        data = parts.permute(0, 1, 3, 4, 2, 5).flatten(-3)
    rows = data.transpose(1, 2).reshape(-1, x.k_blocks * 32)[: x.rows, :k]
    return rows.float() * ACTIVATION_SCALE if kind == "fp8" else rows.float()


def rounded(x: torch.Tensor, kind: str) -> torch.Tensor:
    """x as a weight of this kind sees it, in float64."""
    if kind == "fp8":
        return (x.float() / ACTIVATION_SCALE).half().double() * ACTIVATION_SCALE
    if kind == "w8a8":
        return as_e4m3(x.float()).double()
    return x.float().bfloat16().double()


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative, over all elements."""
    return float((ours.double() - exact).norm() / exact.norm())


class Differences:
    """Counts unequal calls on the device, without waiting for each."""

    def __init__(self) -> None:
        self.count = torch.zeros((), dtype=torch.int64, device="cuda")
        self.calls = 0

    def check(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        assert ours.shape == theirs.shape
        self.count += (ours != theirs).any()
        self.calls += 1

    def none(self) -> bool:
        return int(self.count) == 0 and self.calls > 0


def one_layer(arch: Arch, index: int) -> Arch:
    return replace(arch, layers=(arch.layers[index],))
