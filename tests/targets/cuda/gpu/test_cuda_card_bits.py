"""On the card: a sum's bits depend neither on the card nor on the number of devices that share it.

Other cards are emulated: a weight is dealt as for another number of multiprocessors, and run here.
Several devices are emulated too: each one's part of a weight runs as a weight, and the results of
parts of row_parallel weights are added as the devices would add them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

from targets.arch import released
from targets.cuda import experts, tiles
from targets.cuda.gemm import Gemm
from targets.cuda.kernels import Kernels
from targets.cuda.ops import Linear
from targets.cuda.reader import quantise_fp8
from targets.cuda.w8a8 import W8A8
from tests.targets.cuda.card import (
    KINDS,
    Differences,
    Weight,
    as_input,
    linears,
    one_layer,
    outputs,
    randn,
    random_weight,
    stored,
)

pytestmark = pytest.mark.gpu
MODELS = ["gemma-4-31b", "gemma-4-12b", "gemma-4-26b-a4b", "gemma-4-e4b", "gemma-4-e2b"]
MACHINES = (78, 114, 144)
"""Multiprocessors of other Hoppers: H20, H100 PCIe, a whole die. This one has 132."""
DEVICES = (2, 4, 8)
ROWS = range(1, 257)


def ops_of(name: str) -> Kernels:
    return Kernels(one_layer(released(name), 0), 128, torch.bfloat16, KINDS)


def on_machine(ops: Kernels, processors: int) -> Kernels:
    """The same kernels, as a machine of so many multiprocessors would launch them."""
    other = copy.copy(ops)
    other.processors = processors
    other._gemm = Gemm(ops._launch, processors, bytes_per_cycle=2400.0)
    other._w8a8 = W8A8(ops._launch, processors)
    other.pack = other._gemm.pack
    return other


@pytest.mark.parametrize("wide", ["fp8", "w8a8", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_other_machines_make_the_same_sums(name, wide):
    ops, same = ops_of(name), Differences()
    for n, k, kind, layout in linears(released(name), wide):
        weight = random_weight(ops, (n, k), kind, stored(layout))
        x = randn(ROWS[-1], k, seed=1)
        inputs = randn(ROWS[-1], n, seed=2) if layout == "per layer" else None

        def call(ops: Kernels, weight: Weight, m: int, x=x, layout=layout, inputs=inputs):
            own = None if inputs is None else inputs[:m]
            return outputs(ops, weight, layout, x[:m], own)

        whole = call(ops, weight, ROWS[-1])
        for processors in MACHINES:
            other = on_machine(ops, processors)
            packed = other.pack(weight.values, weight.scale, kind, stored(layout))
            theirs = Weight(packed, weight.values, weight.scale)
            few = ROWS if layout != "head" else (1, 2, 3, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 256)
            for m in few:
                same.check(call(other, theirs, m), whole[:m])
        assert same.none(), (n, k, kind, layout, int(same.count), same.calls)


def parts_of(values: torch.Tensor, devices: int, layout: str) -> Iterator[torch.Tensor]:
    """Each device's part of a weight [n, k], or of what has a value per row [n]."""
    if layout == "row_parallel":
        each = tiles.padded_inputs(values.shape[1]) // devices
        for first in range(0, devices * each, each):
            part = values[:, first : first + each]
            share = torch.zeros((len(values), each), device=values.device).to(values.dtype)
            share[:, : part.shape[1]] = part
            yield share
    elif layout == "gated":
        gate, up = values.chunk(2)
        for share in zip(gate.tensor_split(devices), up.tensor_split(devices), strict=True):
            yield torch.cat(share)
    else:
        yield from values.tensor_split(devices)


def added(sums: list[torch.Tensor]) -> torch.Tensor:
    """As a binary tree of neighbours."""
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def bare(ops: Kernels, values: torch.Tensor, kind: str, groups: int) -> Linear:
    """A part of a row_parallel weight, packed without scales: these apply to the added sums."""
    one = None if kind == "bf16" else torch.ones(len(values), device="cuda")
    scale = None if one is None else one / tiles.ACTIVATION_SCALE
    return ops.pack(values, scale, kind, "row_parallel", groups)


def bare_outputs(ops: Kernels, weight: Weight, layout: str, x: torch.Tensor) -> torch.Tensor:
    """`outputs`, of gated w8a8 weights before they are quantised, by eighths of the whole."""
    if (weight.packed.kind, layout) == ("w8a8", "gated"):
        return ops._w8a8.gated(as_input(x, "w8a8"), weight.packed)
    return outputs(ops, weight, layout, x)


def split_sums(
    ops: Kernels, weight: Weight, devices: int, layout: str, x: torch.Tensor
) -> torch.Tensor:
    """What so many devices make of x, put together."""
    kind, groups = weight.packed.kind, weight.packed.k_groups
    values = list(parts_of(weight.values, devices, layout))
    if layout != "row_parallel":
        scales = [None] * devices
        if weight.scale is not None:
            scales = list(parts_of(weight.scale, devices, layout))
        made = []
        for share, scale in zip(values, scales, strict=True):
            packed = ops.pack(share, scale, kind, stored(layout), groups)
            made.append(bare_outputs(ops, Weight(packed, share, scale), layout, x))
        return torch.cat(made, 1)
    sums = []
    for share, inputs in zip(values, parts_of(x, devices, layout), strict=True):
        packed = bare(ops, share, kind, groups // devices)
        given = as_input(inputs, kind, layout, groups // devices)
        sums.append(ops.linear(given, packed))
    whole = added(sums)
    return whole if weight.packed.scale is None else whole * weight.packed.scale


@pytest.mark.parametrize("wide", ["fp8", "w8a8", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_several_devices_make_the_same_sums(name, wide):
    ops, same = ops_of(name), Differences()
    for n, k, kind, layout in linears(released(name), wide):
        if layout in ("head", "per layer"):  # rows of a plain weight, with another end
            continue
        weight = random_weight(ops, (n, k), kind, stored(layout))
        x = randn(ROWS[-1], k, seed=1)
        for m in (1, 3, 8, 16, 33, 64, 100, 256):
            whole = bare_outputs(ops, weight, layout, x[:m])
            for devices in DEVICES:
                same.check(split_sums(ops, weight, devices, layout, x[:m]), whole)
        assert same.none(), (n, k, kind, layout, int(same.count), same.calls)


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_several_devices_make_the_same_sums_of_an_expert(kind):
    """Cut along its width: 704 are eighths of 96, the last of 32."""
    ops = ops_of("gemma-4-26b-a4b")
    width, hidden, picked, eighth = 704, 2816, 3, 96
    values = randn(picked, hidden, width, seed=3).bfloat16().mul_(width**-0.5)
    values, scale = (values, None) if kind == "bf16" else quantise_fp8(values)
    one = None if scale is None else torch.ones_like(scale) / tiles.ACTIVATION_SCALE
    numbers = torch.arange(picked, dtype=torch.int32, device="cuda")[None].repeat(20, 1)
    x = randn(20 * picked, width, seed=4)

    def down(packed: Linear, inputs: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        padded = inputs.new_zeros((len(inputs), tiles.expert_inputs(packed.k)))
        padded[:, : inputs.shape[1]] = inputs
        wide = padded.bfloat16() if kind == "bf16" else (padded / tiles.ACTIVATION_SCALE).half()
        out = torch.empty((len(inputs), hidden), device="cuda")
        gated = wide.view(torch.int16)
        blocked = padded.shape[1] // tiles.INPUTS, 1
        ops.experts._start("down", experts._job(packed, gated, blocked, pairs, out), packed.kind)
        return out

    for rows in (1, 5, 20):
        pairs, given = numbers[:rows], x[: rows * picked]
        whole = down(ops.pack(values, one, kind, "experts"), given, pairs)
        for devices in DEVICES:
            sums, each = [], tiles.EIGHTHS // devices * eighth
            for first in range(0, width, each):
                share = torch.zeros((picked, hidden, each), device="cuda").to(values.dtype)
                part = values[..., first : first + each]
                share[..., : part.shape[-1]] = part
                packed = ops.pack(share, one, kind, "experts", tiles.EIGHTHS // devices)
                inputs = torch.zeros((len(given), each), device="cuda")
                inputs[:, : part.shape[-1]] = given[:, first : first + each]
                sums.append(down(packed, inputs, pairs))
            while len(sums) < devices:  # devices past the last input have nothing to add
                sums.append(torch.zeros_like(sums[0]))
            assert torch.equal(added(sums), whole), (rows, devices)
