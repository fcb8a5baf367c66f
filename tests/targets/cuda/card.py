"""What the tests on a GPU share: weights, linear layers' inputs and outputs in plain order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from targets.arch import Arch
from targets.cuda import four_bits, int4
from targets.cuda.formulas import as_e4m3
from targets.cuda.gemm import WIDE_FROM
from targets.cuda.inputs import Input, make_input, make_narrow_input
from targets.cuda.kernels import Kernels
from targets.cuda.ops import Linear
from targets.cuda.reader import quantise_fp8
from targets.cuda.tiles import ACTIVATION_SCALE, EIGHTHS, padded_inputs
from tests.targets.cuda.nvfp4_files import as_nvfp4

KINDS = {"fp8", "w8a8", "bf16", "int8", "int4", "uint4", "nvfp4"}
HALF = "fp8", "int4", "uint4", "nvfp4"
"""Kinds with f16 inputs."""


def randn(*shape: int, seed: int = 0, device: str = "cuda") -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device)


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
    if kind in four_bits.KINDS:
        narrow = as_nvfp4(values) if kind == "nvfp4" else int4.quantise(values)
        if kind == "uint4":
            zero = torch.randint(0, 16, narrow.scale.shape, device="cuda").to(torch.uint8)
            narrow = replace(narrow, zero=zero)
        return Weight(ops.pack_codes(narrow, layout), narrow.values(), narrow.row)
    values, scale = (values, None) if kind == "bf16" else quantise_fp8(values)
    return Weight(ops.pack(values, scale, kind, layout), values, scale)


def groups_of(layout: str) -> int:
    """k groups by which a weight's inputs are ordered or scaled."""
    return EIGHTHS if layout == "row_parallel" else 1


def as_input(
    x: torch.Tensor,
    kind: str,
    layout: str = "plain",
    groups: int | None = None,
    block: int | None = None,
) -> Input:
    """x [M, k] as a weight of this kind and layout reads it. groups: of a part of a row_parallel
    weight, which has fewer. block: as in `make_input`."""
    m, k = x.shape
    if kind == "w8a8":
        return _narrow_input(x, groups or groups_of(layout))
    made = make_input(m, k, x.device, groups or groups_of(layout), block)
    blocks, _, block, _ = made.data.shape
    values = (x / ACTIVATION_SCALE).half() if kind in HALF else x.bfloat16()
    rows = values.new_zeros((blocks * block, made.k_blocks * 32))
    rows[:m, :k] = values
    data = rows.view(blocks, block, made.k_blocks, 32).transpose(1, 2)
    if block < WIDE_FROM and made.k_groups > 1:  # the groups' first blocks, their second ones ...
        data = data.unflatten(1, (made.k_groups, -1)).transpose(1, 2).flatten(1, 2)
    if block >= WIDE_FROM:  # pairs of features: [pair of 4, token, quad of 4, 2]
        data = data.unflatten(-1, (4, 4, 2)).permute(0, 1, 4, 2, 3, 5)
    return replace(made, data=data.contiguous().view(torch.int16).view(made.data.shape))


def _narrow_input(x: torch.Tensor, groups: int) -> Input:
    made = make_narrow_input(*x.shape, x.device, groups)
    blocks, k_blocks, block, _ = made.data.shape
    padded = x.new_zeros((len(x), padded_inputs(x.shape[1], groups)))
    padded[:, : x.shape[1]] = x
    values, scale = quantise_fp8(padded.unflatten(1, (groups, -1)))
    rows = made.data.new_zeros((blocks * block, k_blocks * 32))
    rows[: len(x), : padded.shape[1]] = values.flatten(1).view(torch.uint8)
    data = rows.view(blocks, block, k_blocks, 4, 2, 4).permute(0, 2, 4, 1, 3, 5)
    scale = (scale.T / ACTIVATION_SCALE).contiguous()
    return replace(made, data=data.reshape(made.data.shape).contiguous(), scale=scale)


def rows_of(x: Input, k: int, kind: str) -> torch.Tensor:
    """[M, k]: the inverse."""
    if kind == "w8a8":
        assert x.scale is not None
        parts = x.data.view(*x.data.shape[:2], 2, x.block, 4, 4).permute(0, 3, 1, 4, 2, 5)
        rows = parts.reshape(-1, x.k_blocks * 32)[: x.rows].contiguous().view(torch.float8_e4m3fn)
        apart = rows.float().unflatten(1, (len(x.scale), -1)) * x.scale.T[..., None]
        return apart.flatten(1)[:, :k] * ACTIVATION_SCALE
    data = x.data.view(torch.float16 if kind in HALF else torch.bfloat16)
    if x.block < WIDE_FROM and x.k_groups > 1:
        data = data.unflatten(1, (-1, x.k_groups)).transpose(1, 2).flatten(1, 2)
    if x.block >= WIDE_FROM:
        parts = data.view(*data.shape[:2], 4, x.block, 4, 2)
        data = parts.permute(0, 1, 3, 4, 2, 5).flatten(-3)
    rows = data.transpose(1, 2).reshape(-1, x.k_blocks * 32)[: x.rows, :k]
    return rows.float() * ACTIVATION_SCALE if kind in HALF else rows.float()


def rounded(x: torch.Tensor, kind: str, layout: str = "plain") -> torch.Tensor:
    """x as a weight of this kind and layout sees it, in float64."""
    if kind in HALF:
        return (x.float() / ACTIVATION_SCALE).half().double() * ACTIVATION_SCALE
    if kind == "w8a8":
        return as_e4m3(x.float(), groups_of(layout)).double()
    return x.float().bfloat16().double()


def mixed(
    wide: tuple[torch.Tensor, torch.Tensor],
    numbers: torch.Tensor,
    x: torch.Tensor,
    kind: str,
    rounds: bool = True,
) -> torch.Tensor:
    """The outputs [M, top_k, H] in float64 of experts of gates and ups [E, 2W, H] and downs
    [E, H, W] that rows x picked, 0 where none; inputs rounded as for this kind, or not at all."""

    def given(v):
        return rounded(v, kind) if rounds else v.double()

    gate_up, down = wide
    out = torch.zeros(*numbers.shape, x.shape[1], dtype=torch.float64, device=x.device)
    for row, value in enumerate(given(x)):
        for rank, number in enumerate(numbers[row].tolist()):
            if number >= 0:
                left, right = (gate_up[number].double() @ value).chunk(2)
                inner = given(F.gelu(left, approximate="tanh") * right)
                out[row, rank] = down[number].double() @ inner
    return out


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


def outputs(
    ops: Kernels, weight: Weight, layout: str, x: torch.Tensor, inputs: torch.Tensor | None = None
) -> torch.Tensor:
    """What a linear layer, named as in `linears`, makes of x [M, k], in plain order. inputs [M, n]:
    of a layer with inputs of its own."""
    packed, kind = weight.packed, weight.packed.kind
    fed = as_input(x, kind, layout)
    if layout == "gated":
        return rows_of(ops.gated(fed, packed, kind), packed.n // 2, kind)
    if layout == "per layer":
        assert inputs is not None
        made = ops.gated_per_layer(fed, packed, inputs, 0, "bf16")
        return rows_of(made, packed.n, "bf16")
    if layout == "head":
        return ops.head(fed, packed, ops.arch.softcap)
    return ops.linear(fed, packed)


def stored(layout: str) -> str:
    """As a weight's own layout."""
    return layout if layout in ("gated", "row_parallel") else "plain"


def linears(arch: Arch, wide: str) -> dict[tuple[int, int, str, str], None]:
    """n, k, kind, layout of every skinny GEMM; the head and what stays wide are bf16 always."""
    found: dict[tuple[int, int, str, str], None] = {}
    for layer in arch.layers:
        own = 0 if layer.kv_from is not None else 1 if layer.k_eq_v else 2
        width = layer.heads * layer.head_dim
        qkv = width + own * layer.kv_heads * layer.head_dim
        found[qkv, arch.hidden, wide, "plain"] = None
        found[arch.hidden, width, wide, "row_parallel"] = None
        found[2 * layer.ffw, arch.hidden, wide, "gated"] = None
        found[arch.hidden, layer.ffw, wide, "row_parallel"] = None
        if layer.moe:
            found[layer.moe.experts, arch.hidden, "bf16", "plain"] = None
    if arch.per_layer_input:
        found[arch.per_layer_input, arch.hidden, "bf16", "per layer"] = None
        found[arch.hidden, arch.per_layer_input, "bf16", "plain"] = None
        found[len(arch.layers) * arch.per_layer_input, arch.hidden, "bf16", "plain"] = None
    found[arch.vocab, arch.hidden, "bf16", "head"] = None
    return found
