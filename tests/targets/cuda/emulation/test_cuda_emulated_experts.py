"""moe.cu without a GPU: each kind of weight near float64, a row the same in any company and on any
number of devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from specdec.core.types import NO_GUESS
from targets.arch import MoeSpec, released
from targets.cuda import experts as launches, four_bits, tiles
from targets.cuda.experts import Experts
from targets.cuda.formulas import rank
from targets.cuda.gemm import Gemm
from targets.cuda.ops import DenseBranch, RoutedBranch, Rows
from targets.model_folder import read_arch
from tests.support.tiny import write_tiny
from tests.targets.cuda.card import as_input, error, mixed
from tests.targets.cuda.emulation.emulated import Kernels, Launcher, just_written
from tests.targets.cuda.emulation.emulated_weights import KINDS, Weight, drawn, randn

ROUNDED = {"int4": 1e-3, "bf16": 1e-3}
"""Relative error, else 2e-4: inputs of the second matmul now and then round the other way."""
PROCESSORS = 2
COUNT = 5
HIDDEN = 352
WIDTH = 96
PICKED = 3
MOST_PAIRS_AT_ONCE = 64
"""experts.cuh's kFew."""
EIGHTH = 96
"""Of 704 features, cut along k."""


@pytest.fixture(scope="module")
def linear() -> Gemm:
    return Gemm(Launcher(), PROCESSORS, 1.0)


@pytest.fixture(scope="module")
def experts(linear) -> Experts:
    return Experts(Launcher(), linear, released("gemma-4-26b-a4b"), PROCESSORS)


def chosen(rows: int, together: bool = False, count: int = COUNT) -> torch.Tensor:
    """Experts [rows, PICKED] int32; a row in five picks none."""
    draw = torch.Generator().manual_seed(rows)
    picks = [torch.randperm(count, generator=draw)[:PICKED] for _ in range(rows)]
    numbers = torch.stack(picks[:1] * rows if together else picks).int()
    numbers[3::5] = -1
    return numbers


def sums_of(
    experts: Experts,
    linear: Gemm,
    weights,
    x: torch.Tensor,
    numbers: torch.Tensor,
    ready: bool = False,
):
    """The picked experts' outputs [M, PICKED, H]; zeros for rows without experts. ready: the inputs
    are complete before the first kernel starts (other memory is marked as just written)."""
    gate_up, down = weights
    given = gate_up.packed(linear, "experts_gated"), down.packed(linear, "experts")
    fed = as_input(x, gate_up.kind)
    just_written(*[torch.zeros(4)] if ready else [fed.data, numbers])
    routed = experts.run(fed, (numbers, torch.empty(0)), *given, ready)
    return routed.parts.masked_fill(numbers[..., None] < 0, 0.0)


def exactly(weights, x: torch.Tensor, numbers: torch.Tensor, rounds: bool = True) -> torch.Tensor:
    """The same in float64, inputs of both matrices rounded as these kernels' are, or not at all."""
    gate_up, down = weights
    return mixed((gate_up.meant, down.meant), numbers, x, gate_up.kind, rounds)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_themselves_and_near(experts, linear, kind):
    shape = (COUNT, 2 * WIDTH, HIDDEN), (COUNT, HIDDEN, WIDTH)
    weights = drawn(shape[0], kind, 1), drawn(shape[1], kind, 2)
    for rows, together in ((1, False), (4, True), (5, False), (8, True), (11, False)):
        x, numbers = randn(rows, HIDDEN, seed=rows), chosen(rows, together)
        whole = sums_of(experts, linear, weights, x, numbers)
        assert error(whole, exactly(weights, x, numbers)) <= ROUNDED.get(kind, 2e-4), rows
        for row in (0, rows - 1):
            one = slice(row, row + 1)
            assert torch.equal(sums_of(experts, linear, weights, x[one], numbers[one]), whole[one])


def test_inputs_that_are_ready_are_read_at_once(experts, linear):
    """Yet the first kernel waits, with a part for each CTA or for none: the second's wait is for
    all before it."""
    weights = drawn((COUNT, 2 * WIDTH, HIDDEN), "int4", 1), drawn((COUNT, HIDDEN, WIDTH), "int4", 2)
    x, numbers = randn(11, HIDDEN, seed=11), chosen(11)
    alone = Experts(Launcher(), linear, released("gemma-4-26b-a4b"), 1)
    whole = sums_of(experts, linear, weights, x, numbers)
    assert torch.equal(sums_of(alone, linear, weights, x, numbers, ready=True), whole)
    nothing = torch.full_like(numbers, -1)
    assert not sums_of(experts, linear, weights, x, nothing, ready=True).any()


def test_many_pairs_are_sorted_too(experts, linear):
    """More than threads look at one by one, of more experts than a warp has lanes."""
    count, rows = 40, MOST_PAIRS_AT_ONCE // PICKED + 8
    weights = drawn((count, 2 * 16, 64), "int4", 1), drawn((count, 64, 16), "int4", 2)
    x, numbers = randn(rows, 64, seed=1), chosen(rows, count=count)
    whole = sums_of(experts, linear, weights, x, numbers)
    assert error(whole, exactly(weights, x, numbers)) <= ROUNDED["int4"]
    last = slice(rows - 2, rows)
    assert torch.equal(sums_of(experts, linear, weights, x[last], numbers[last]), whole[last])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number_stays_in_its_row(experts, linear, kind):
    """And where a few inputs are a hundred times the others, sums are as near as with inputs of
    eleven bits."""
    shape = (COUNT, 2 * WIDTH, HIDDEN), (COUNT, HIDDEN, WIDTH)
    weights = drawn(shape[0], kind, 1), drawn(shape[1], kind, 2)
    x, numbers = randn(5, HIDDEN, seed=5), chosen(5, together=True)
    x[:, ::70] *= 100
    whole = sums_of(experts, linear, weights, x, numbers)
    exact = exactly(weights, x, numbers, rounds=False)
    assert error(whole, exact) <= 1.5 * error(exactly(weights, x, numbers), exact)
    x[1, 7], x[2] = torch.nan, 0
    strange = sums_of(experts, linear, weights, x, numbers)
    assert torch.equal(strange[[0, 4]], whole[[0, 4]])
    assert not strange[2].any()


@pytest.mark.parametrize("kind", KINDS)
def test_devices_make_the_same_sums(experts, linear, kind):
    """Cut along its width: 704 are eighths of 96, the last of 32."""
    width, hidden = 704, 64
    weight = drawn((PICKED, hidden, width), kind, 3)
    ones = torch.ones(PICKED, hidden)  # else sums of parts are scaled, and then added
    if weight.codes is not None:
        weight = replace(weight, codes=replace(weight.codes, row=ones))
    elif weight.scale is not None:
        weight = replace(weight, scale=ones)

    def down(part: Weight, inputs: torch.Tensor, numbers: torch.Tensor, groups: int):
        packed = part.packed(linear, "experts", groups)
        wide = F.pad(inputs, (0, tiles.expert_inputs(packed.k) - inputs.shape[-1]))
        wide = wide.bfloat16() if kind == "bf16" else (wide / tiles.ACTIVATION_SCALE).half()
        out = torch.empty((len(inputs), hidden))
        blocked = wide.shape[1] // tiles.INPUTS, 1
        job = launches._job(packed, wide.view(torch.int16), blocked, numbers, out)
        experts._start("down", job, kind)
        return out

    for rows in (1, 5, 12):
        numbers = torch.arange(PICKED, dtype=torch.int32).repeat(rows, 1)
        x = F.pad(randn(rows * PICKED, width, seed=rows), (0, 8 * EIGHTH - width))
        whole = down(weight, x[:, :width], numbers, 8)
        for devices in (2, 4, 8):
            each = 8 // devices * EIGHTH
            parts = [
                down(weight.cut(first, each), x[:, first : first + each], numbers, 8 // devices)
                for first in range(0, 8 * EIGHTH, each)
            ]
            while len(parts) > 1:
                parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
            assert torch.equal(parts[0], whole), (rows, devices)


@pytest.mark.parametrize("kind", four_bits.KINDS)
def test_many_rows_by_expert(experts, linear, kind):
    """grouped.cu: rows sorted by expert; one expert has no rows."""
    weight = drawn((4, 96, 80), kind, 4)
    ends = torch.tensor([3, 3, 70, 81], dtype=torch.int32)
    x = (randn(81, 80, seed=6) / tiles.ACTIVATION_SCALE).half()
    ours = experts.grouped(x, ends, weight.packed(linear, "experts_gated"))
    owner = torch.bucketize(torch.arange(81), ends, right=True)
    exact = weight.meant.double()[owner] @ x.double()[..., None] * tiles.ACTIVATION_SCALE
    assert error(ours, exact[..., 0]) <= 3e-3  # a bfloat16


@pytest.mark.parametrize("kind", launches.SORTED_KINDS)
def test_a_prompts_rows_are_sorted_by_expert(experts, linear, kind):
    """Near float64, a row the same in any company; an expert of more rows than a CTA takes, and
    rows that picked none."""
    shape = (COUNT, 2 * 48, 80), (COUNT, 80, 48)
    gate_up, down = drawn(shape[0], kind, 1), drawn(shape[1], kind, 2)
    packed = gate_up.packed(linear, "experts_gated"), down.packed(linear, "experts")
    x, numbers = randn(90, 80, seed=3), chosen(90)
    numbers[:70, 0] = 2
    numbers[:70, 1:] = torch.tensor([0, 4])

    def call(rows: slice) -> torch.Tensor:
        fed = as_input(x[rows], kind, block=launches.SORTED_BLOCK)
        shares = torch.empty(0)
        routed = experts.run_sorted(fed, (numbers[rows].contiguous(), shares), *packed)
        return routed.parts.masked_fill(numbers[rows][..., None] < 0, 0.0)

    whole = call(slice(0, 90))
    exact = mixed((gate_up.meant, down.meant), numbers, x, "fp8", False)
    assert error(whole, exact) <= 1e-3
    for rows in (slice(0, 1), slice(60, 90), slice(0, 70)):
        assert torch.equal(call(rows), whole[rows])


def test_a_router_chooses_the_best():
    """One kernel (a cluster of CTAs) and two kernels agree; rows that sit out and missing drafts
    get no experts."""
    moe, rows, arch = MoeSpec(128, 8, WIDTH), 5, released("gemma-4-26b-a4b")
    weight, x = drawn((moe.experts, 512), "bf16", 1), 9 * randn(rows, 512, seed=2)
    per_expert = 1 + 0.2 * randn(moe.experts, seed=3)
    tokens = torch.tensor([[0], [NO_GUESS], [0], [0], [0]], dtype=torch.int32)
    slots = torch.tensor([0, 1, 2, -1, 4], dtype=torch.int32)
    given, out = as_input(x, "bf16"), torch.tensor([False, True, False, True, False])

    def call(processors: int, together: bool) -> tuple[torch.Tensor, torch.Tensor]:
        linear = Gemm(Launcher(), processors, 1.0)
        router = Experts(Launcher(), linear, arch, processors)
        proj = weight.packed(linear, "plain")
        just_written(given.data)
        chosen, at_once = router.route(given, proj, per_expert, Rows(tokens, slots, slots), moe)
        assert at_once == together
        return chosen

    numbers, shares = call(132, True)
    assert all(map(torch.equal, call(PROCESSORS, False), (numbers, shares)))
    logits = x.bfloat16().double() @ weight.meant.double().T
    best, parts = rank((logits * arch.hidden**-0.5).softmax(-1), per_expert, moe)
    assert (numbers[out] == -1).all() and (shares[out] == 0).all()
    assert torch.equal(numbers[~out], best[~out])
    assert error(shares[~out], parts[~out]) <= 1e-6


def test_a_dense_branch_begins_beside_the_router(tmp_path, eager):
    """It reads its input before the router has ended, and no kernel before the router may run."""
    write_tiny(tmp_path, "26b-a4b")
    moe, rows, hidden = MoeSpec(128, 8, 32), 2, 64
    arch = read_arch(tmp_path)
    layers = tuple(replace(layer, moe=moe) for layer in arch.layers)
    arch = replace(arch, hidden=hidden, layers=layers)
    layouts = {
        "dense_up": ((2 * WIDTH, hidden), "gated"),
        "dense_down": ((hidden, WIDTH), "row_parallel"),
        "router": ((moe.experts, hidden), "plain"),
        "up": ((moe.experts, 2 * moe.width, hidden), "experts_gated"),
        "down": ((moe.experts, hidden, moe.width), "experts"),
    }
    x, norm = randn(rows, hidden, seed=1), 1 + 0.1 * randn(hidden, seed=2)
    tokens, slots = torch.zeros((rows, 1), dtype=torch.int32), torch.arange(rows).int()

    def branch_of(ops):
        """Of the dense weights, before its norm."""
        given = {
            name: drawn(shape, "bf16" if name == "router" else "int4", 3).packed(ops._gemm, layout)
            for name, (shape, layout) in layouts.items()
        }
        fed = as_input(x, "int4")
        dense = DenseBranch(fed, given["dense_up"], given["dense_down"], norm)
        router = as_input(x, "bf16"), given["router"], torch.ones(moe.experts)
        routed = RoutedBranch(*router, as_input(x, "int4"), given["up"], given["down"], norm)
        just_written(fed.data)
        return ops.mixture(dense, routed, Rows(tokens, slots, slots), moe).dense

    ours = Kernels(arch, 128, torch.bfloat16, {"int4", "bf16"})
    first = branch_of(ours)
    assert torch.isfinite(first).all()
    assert all(torch.equal(branch_of(ours), first) for _ in range(3))
