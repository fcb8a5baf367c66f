"""On the card: a mixture's rows are themselves, near float64, and read no expert for nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specdec.core.types import NO_GUESS
from targets.arch import MoeSpec, released
from targets.cuda.kernels import Kernels
from targets.cuda.ops import Rows
from tests.card import (
    KINDS,
    Differences,
    as_input,
    error,
    one_layer,
    randn,
    random_weight,
    rounded,
)

pytestmark = pytest.mark.gpu
MOST = 64
ROUNDED = {"fp8": 2e-4, "int4": 2e-4, "uint4": 2e-4, "bf16": 1e-3}
"""Relative error: inputs of the second matmul now and then round the other way (11 or 8 bits)."""
MOE = MoeSpec(128, 8, 704)


def live(count: int) -> Rows:
    """Rows of one token each, none of which sits out."""
    zeros = torch.zeros(count, dtype=torch.int32, device="cuda")
    return Rows(zeros[:, None], zeros, zeros)


@pytest.fixture(scope="module")
def moe_ops() -> Kernels:
    return Kernels(one_layer(released("gemma-4-26b-a4b"), 0), 128, torch.bfloat16, KINDS)


def test_routes(moe_ops):
    hidden = moe_ops.arch.hidden
    h, scale = 3 * randn(256, hidden), 1 + 0.2 * randn(hidden, seed=1)
    per_expert = 1 + 0.2 * randn(128, seed=2)
    proj = random_weight(moe_ops, (128, hidden), "bf16", seed=3)

    def call(part):
        return moe_ops.route(part.clone(), scale, proj.packed, per_expert, live(len(part)), MOE)

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
    numbers, shares = moe_ops.route(h, h[0], packed, ones, live(2), MOE)
    assert numbers.tolist() == [list(range(8))] * 2
    assert (shares == 0.125).all()


@pytest.mark.parametrize("picks", ["apart", "together"])
@pytest.mark.parametrize("kind", ["fp8", "int4", "uint4", "bf16"])
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
        return moe_ops.experts(given, chosen, gate_up.packed, down.packed)

    whole, same = call(0, rows), Differences()
    for m in (*range(1, MOST + 1), 100, 255):
        same.check(call(0, m), whole[:m])
        same.check(call(rows - m, rows), whole[rows - m :])
    for row in range(rows):
        same.check(call(row, row + 1), whole[row : row + 1])
    assert same.none(), int(same.count)
    few = 4
    exact = torch.zeros((few, hidden), dtype=torch.float64, device="cuda")
    wide = [
        w.values.float() * (1 if w.scale is None else w.scale[..., None]) for w in (gate_up, down)
    ]
    for row, value in enumerate(rounded(x[:few], kind)):
        for rank, number in enumerate(numbers[row].tolist()):
            left, right = (wide[0][number].double() @ value).chunk(2)
            inner = rounded(F.gelu(left, approximate="tanh") * right, kind)
            exact[row] += shares[row, rank].double() * (wide[1][number].double() @ inner)
    assert error(whole[:few], exact) <= ROUNDED[kind]


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
        chosen = moe_ops.route(h.clone(), scale, proj.packed, per_expert, rows, MOE)
        poison = torch.full((m * MOE.top_k, hidden), torch.nan, device="cuda")
        del poison  # what nobody writes is then NaN
        return chosen[0], moe_ops.experts(x, chosen, gate_up, down)

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
