"""On the card: a mixture's rows are themselves, near float64, and read no expert for nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specdec.core.types import NO_GUESS
from targets.arch import MoeSpec, released
from targets.cuda import four_bits
from targets.cuda.experts import SORTED_BLOCK, SORTED_KINDS, Routed
from targets.cuda.kernels import Kernels
from targets.cuda.ops import Closing, DenseBranch, Opening, RoutedBranch, Rows
from targets.cuda.tiles import ACTIVATION_SCALE
from tests.targets.cuda.card import (
    KINDS,
    Differences,
    Weight,
    as_input,
    error,
    mixed,
    one_layer,
    randn,
    random_weight,
    rounded,
)

pytestmark = pytest.mark.gpu
MOST = 64
ROUNDED = {"fp8": 2e-4, "int4": 2e-4, "uint4": 2e-4, "nvfp4": 2e-4, "bf16": 1e-3}
"""Relative error: inputs of the second matmul now and then round the other way (11 or 8 bits)."""
MOE = MoeSpec(128, 8, 704)


def live(count: int) -> Rows:
    """Rows of one token each, none of which sits out."""
    zeros = torch.zeros(count, dtype=torch.int32, device="cuda")
    return Rows(zeros[:, None], zeros, zeros)


def summed(routed: Routed) -> torch.Tensor:
    """The experts' outputs added by rank, as a norm adds them; 0 for a row without experts."""
    total = torch.zeros_like(routed.parts[:, 0])
    for rank in range(routed.parts.shape[1]):
        total = torch.addcmul(total, routed.shares[:, rank, None], routed.parts[:, rank])
    return total.masked_fill(routed.numbers[:, :1] < 0, 0.0)


@pytest.fixture(scope="module")
def moe_ops() -> Kernels:
    return Kernels(one_layer(released("gemma-4-26b-a4b"), 0), 128, torch.bfloat16, KINDS)


def test_routes(moe_ops):
    hidden = moe_ops.arch.hidden
    h, scale = 3 * randn(256, hidden), 1 + 0.2 * randn(hidden, seed=1)
    per_expert = 1 + 0.2 * randn(128, seed=2)
    proj = random_weight(moe_ops, (128, hidden), "bf16", seed=3)

    def call(part):
        x = moe_ops.norm(part.clone(), Opening(scale, "bf16"))
        return moe_ops.experts.route(x, proj.packed, per_expert, live(len(part)), MOE)[0]

    numbers, shares = call(h)
    same = Differences()
    for m in (*range(1, MOST + 1), 100, 255):
        for ours, theirs in zip(call(h[:m]), (numbers, shares), strict=True):
            same.check(ours, theirs[:m])
        for ours, theirs in zip(call(h[m : m + 1]), (numbers, shares), strict=True):
            same.check(ours, theirs[m : m + 1])
    assert same.none()
    inverse = (h.square().mean(-1, keepdim=True) + moe_ops.arch.eps).rsqrt()
    x = (h * inverse * scale).bfloat16().double()
    logits = proj.times(x) * hidden**-0.5
    best, order = logits.softmax(-1).topk(8)
    sure = (numbers == order).all(1)
    assert sure.float().mean() > 0.98  # an input that rounds the other way can swap two
    exact = best / best.sum(-1, keepdim=True) * per_expert.double()[order]
    assert error(shares[sure], exact[sure]) <= 1e-4


def test_equal_experts_go_by_number(moe_ops):
    h = torch.ones((2, moe_ops.arch.hidden), device="cuda")
    proj = random_weight(moe_ops, (128, moe_ops.arch.hidden), "bf16")
    same_rows = proj.values[:1].expand(128, -1).contiguous()
    packed = moe_ops.pack(same_rows, None, "bf16", "plain")
    ones = torch.ones(128, device="cuda")
    x = moe_ops.norm(h, Opening(h[0], "bf16"))
    (numbers, shares), _ = moe_ops.experts.route(x, packed, ones, live(2), MOE)
    assert numbers.tolist() == [list(range(8))] * 2
    assert (shares == 0.125).all()


@pytest.mark.parametrize("picks", ["apart", "together"])
@pytest.mark.parametrize("kind", ["fp8", "int4", "uint4", "nvfp4", "bf16"])
def test_experts(moe_ops, kind, picks):
    hidden, rows = moe_ops.arch.hidden, 256
    gate_up = random_weight(moe_ops, (128, 1408, hidden), kind, "experts_gated")
    down = random_weight(moe_ops, (128, hidden, 704), kind, "experts", seed=1)
    liking = torch.arange(128.0, device="cuda").expand(rows, -1)
    if picks == "apart":
        liking = randn(rows, 128, seed=2)
    numbers = liking.argsort(dim=1, descending=True)[:, :8].int().contiguous()
    x, shares = randn(rows, hidden, seed=3), randn(rows, 8, seed=4).abs()

    def call(first: int, stop: int) -> torch.Tensor:
        chosen = numbers[first:stop].contiguous(), shares[first:stop].contiguous()
        given = as_input(x[first:stop], kind)
        return summed(moe_ops.experts.run(given, chosen, gate_up.packed, down.packed))

    whole, same = call(0, rows), Differences()
    for m in (*range(1, MOST + 1), 100, 255):
        same.check(call(0, m), whole[:m])
        same.check(call(rows - m, rows), whole[rows - m :])
    for row in range(rows):
        same.check(call(row, row + 1), whole[row : row + 1])
    assert same.none(), int(same.count)
    few = 4
    exact = mixed(in_full(gate_up, down), numbers[:few], x[:few], kind)
    assert error(whole[:few], shared_out(exact, shares)) <= ROUNDED[kind]


def in_full(*weights: Weight) -> tuple[torch.Tensor, ...]:
    return tuple(w.values.float() * (1 if w.scale is None else w.scale[..., None]) for w in weights)


def shared_out(outputs: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Experts' outputs [M, top_k, H] by their shares -> [M, H]."""
    return (outputs * shares[: len(outputs), :, None].double()).sum(1)


@pytest.mark.parametrize("kind", ["fp8", "int4", "uint4", "nvfp4", "bf16"])
def test_experts_of_great_inputs_and_of_none(moe_ops, kind):
    """As near as with inputs of eleven bits where a few are a hundred times the others. What is
    not a number stays in its row, and a row of zeros gives zeros."""
    hidden, rows = moe_ops.arch.hidden, 4
    gate_up = random_weight(moe_ops, (128, 1408, hidden), kind, "experts_gated")
    down = random_weight(moe_ops, (128, hidden, 704), kind, "experts", seed=1)
    x, shares = randn(rows, hidden, seed=3), randn(rows, 8, seed=4).abs()
    x[:, ::700] *= 100
    numbers = torch.arange(8, dtype=torch.int32, device="cuda").expand(rows, -1).contiguous()
    chosen = numbers, shares

    def call(x: torch.Tensor) -> torch.Tensor:
        routed = moe_ops.experts.run(as_input(x, kind), chosen, gate_up.packed, down.packed)
        return summed(routed)

    whole, wide = call(x), in_full(gate_up, down)
    outputs = (mixed(wide, numbers, x, kind, rounds) for rounds in (False, True))
    exact, as_rounded = (shared_out(each, shares) for each in outputs)
    assert error(whole, exact) <= 1.5 * error(as_rounded, exact)
    strange = x.clone()
    strange[1, 7], strange[2] = torch.nan, 0
    given = call(strange)
    assert torch.equal(given[[0, 3]], whole[[0, 3]])
    assert not given[2].any()


@pytest.mark.parametrize("kind", four_bits.KINDS)
@pytest.mark.parametrize(
    ("n", "k", "layout"),
    [(1408, 2816, "experts_gated"), (2816, 704, "experts"), (96, 80, "experts_gated")],
)
def test_rows_by_expert(moe_ops, kind, n, k, layout):
    """Of a long prefill: experts of no row, of a few, and of more than a CTA takes. A row's result
    is the row's alone."""
    counts = [0, 1, 200, 64, 0, 65, 7, 63]
    weight = random_weight(moe_ops, (len(counts), n, k), kind, layout)
    x = (randn(sum(counts), k, seed=2) / ACTIVATION_SCALE).half()

    def ends(counts):
        return torch.tensor(counts, device="cuda").cumsum(0).int()

    ours = moe_ops.grouped(x, ends(counts), weight.packed)
    wide = weight.values.double() * weight.scale.double()[..., None] * ACTIVATION_SCALE
    parts = zip(x.double().split(counts), wide, strict=True)
    assert error(ours, torch.cat([part @ own.T for part, own in parts])) < 4e-3
    lone = moe_ops.grouped(x[150:151], ends([0, 0, 1, 0, 0, 0, 0, 0]), weight.packed)
    assert torch.equal(lone, ours[150:151])


@pytest.mark.parametrize("kind", SORTED_KINDS)
def test_a_prompts_rows_are_sorted_by_expert(moe_ops, kind):
    """Near float64; a row the same in any company. Experts of no row, and of more than a CTA
    takes; rows that picked none."""
    hidden, rows = moe_ops.arch.hidden, 700
    gate_up = random_weight(moe_ops, (128, 1408, hidden), kind, "experts_gated")
    down = random_weight(moe_ops, (128, hidden, 704), kind, "experts", seed=1)
    x, shares = randn(rows, hidden, seed=3), randn(rows, 8, seed=4).abs()
    draw = torch.rand((rows, 100), device="cuda", generator=torch.Generator("cuda").manual_seed(5))
    numbers = draw.topk(8).indices.int()  # of 100 of 128 experts
    numbers[:300, 0] = 127
    numbers[::7] = -1

    def call(m: int) -> torch.Tensor:
        fed = as_input(x[:m], kind, block=SORTED_BLOCK)
        chosen = numbers[:m].contiguous(), shares[:m]
        return summed(moe_ops.experts.run_sorted(fed, chosen, gate_up.packed, down.packed))

    whole, few = call(rows), 150
    wide = in_full(gate_up, down)
    exact = shared_out(mixed(wide, numbers[:few], x[:few], "fp8", False), shares[:few])
    assert error(whole[:few], exact) <= 2e-3
    for m in (few, 299, 650):
        assert torch.equal(call(m), whole[:m])


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_rows_that_sit_out_pick_nobody(moe_ops, kind):
    """Nor do drafts that don't exist: they come out as 0, and change no bit of the others."""
    hidden, batch, tokens = moe_ops.arch.hidden, 6, 5
    m = batch * tokens
    proj = random_weight(moe_ops, (128, hidden), "bf16", seed=3)
    gate_up = random_weight(moe_ops, (128, 1408, hidden), kind, "experts_gated").packed
    down = random_weight(moe_ops, (128, hidden, 704), kind, "experts", seed=1).packed
    h, scale = 3 * randn(m, hidden), 1 + 0.2 * randn(hidden, seed=1)
    x, per_expert = as_input(randn(m, hidden, seed=5), kind), torch.ones(128, device="cuda")

    def call(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        x_router = moe_ops.norm(h.clone(), Opening(scale, "bf16"))
        chosen, _ = moe_ops.experts.route(x_router, proj.packed, per_expert, rows, MOE)
        poison = torch.full((m * MOE.top_k, hidden), torch.nan, device="cuda")
        del poison  # unwritten memory is then NaN
        return chosen[0], summed(moe_ops.experts.run(x, chosen, gate_up, down))

    slot = torch.arange(batch, dtype=torch.int32, device="cuda")
    ids = torch.zeros((batch, tokens), dtype=torch.int32, device="cuda")
    numbers, whole = call(Rows(ids, slot, slot))
    assert (numbers >= 0).all()
    ids[1, 2:], ids[4, 1:] = NO_GUESS, NO_GUESS
    slot = torch.tensor([3, 0, -1, 5, 1, -1], dtype=torch.int32, device="cuda")
    fewer, some = call(Rows(ids, slot, slot))
    out = ((slot[:, None] < 0) | (ids == NO_GUESS)).flatten()
    assert (fewer[out] == -1).all() and (some[out] == 0).all()
    assert torch.equal(fewer[~out], numbers[~out]) and torch.equal(some[~out], whole[~out])
    nobody, nothing = call(Rows(ids, slot, torch.full_like(slot, -1)))
    assert (nobody == -1).all() and (nothing == 0).all()


@pytest.mark.parametrize("kind", ["fp8", "w8a8", "int4", "nvfp4", "bf16"])
def test_a_layer_of_two_branches(moe_ops, kind):
    """From the stream to the stream: every row is itself at any batch, near float64, whichever
    kernel starts while which other still runs, and beside rows that sit out."""
    hidden, most = moe_ops.arch.hidden, 130
    experts_kind = "fp8" if kind == "w8a8" else kind

    def weight(shape, *rest, **keys):
        return random_weight(moe_ops, shape, *rest, **keys)

    dense_up, dense_down = (
        weight((4224, hidden), kind, "gated", seed=1),
        weight((hidden, 2112), kind, "row_parallel", seed=2),
    )
    gate_up = weight((128, 1408, hidden), experts_kind, "experts_gated", seed=3)
    down = weight((128, hidden, 704), experts_kind, "experts", seed=4)
    proj = weight((128, hidden), "bf16", seed=5)
    norms = [1 + 0.2 * randn(hidden, seed=10 + i) for i in range(7)]
    pre, scale, pre_experts, dense_norm, routed_norm, post, following = norms
    per_expert, h = 1 + 0.2 * randn(128, seed=20), 3 * randn(most, hidden, seed=21)
    branch = randn(most, hidden, seed=22)
    tokens = torch.zeros((most, 1), dtype=torch.int32, device="cuda")
    zeros = torch.zeros(most, dtype=torch.int32, device="cuda")

    def call(rows: slice, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stream, of = h[rows].clone(), Rows(tokens[rows], zeros[rows], slot)
        openings = Opening(pre, kind), Opening(scale, "bf16"), Opening(pre_experts, experts_kind)
        closing = Closing(branch[rows].contiguous(), post)
        x, x_router, x_experts = moe_ops.norm_moe(stream, openings, of, closing)
        dense = DenseBranch(x, dense_up.packed, dense_down.packed, dense_norm)
        experts = gate_up.packed, down.packed, routed_norm
        routed = RoutedBranch(x_router, proj.packed, per_expert, x_experts, *experts)
        added = moe_ops.mixture(dense, routed, of, MOE)
        kept = torch.empty_like(stream)
        x = moe_ops.norm(stream, Opening(following, "bf16"), Closing(added, post), kept)
        assert torch.equal(kept, stream)
        return stream, moe_ops.linear(x, proj.packed)

    whole, same = call(slice(0, most), zeros), Differences()
    for m in (*range(1, 34), 64, 65, 129):
        for first in (0, most - m):
            rows = slice(first, first + m)
            for ours, theirs in zip(call(rows, zeros[rows]), whole, strict=True):
                same.check(ours, theirs[rows])
    for m in (3, 8, 16, 40):
        slot = zeros[:m].clone()
        slot[::2] = -1
        for ours, theirs in zip(call(slice(0, m), slot), whole, strict=True):
            same.check(ours[1::2], theirs[1:m:2])
    assert same.none(), int(same.count)

    def rms(rows: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return rows * (rows.square().mean(-1, keepdim=True) + moe_ops.arch.eps).rsqrt() * by

    few = 4
    stream = h[:few].double() + rms(branch[:few].double(), post.double())
    x = rounded(rms(stream, pre.double()).float(), kind)
    left, right = dense_up.times(x).chunk(2, -1)
    inner = rounded((F.gelu(left, approximate="tanh") * right).float(), kind, "row_parallel")
    added = rms(dense_down.times(inner), dense_norm.double())
    x_router = rms(stream, scale.double()).bfloat16().double()
    best, order = (proj.times(x_router) * hidden**-0.5).softmax(-1).topk(8)
    shares = best / best.sum(-1, keepdim=True) * per_expert.double()[order]
    x_experts = rms(stream, pre_experts.double()).float()
    outputs = mixed(in_full(gate_up, down), order, x_experts, experts_kind)
    total = shared_out(outputs, shares)
    stream = stream + rms(added + rms(total, routed_norm.double()), post.double())
    assert error(whole[0][:few], stream) <= (2e-2 if kind == "w8a8" else 2e-3)
