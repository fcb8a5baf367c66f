"""On the card: row r of any call is bitwise the row alone, and near what float64 says."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from targets.arch import Arch, MoeSpec, released
from targets.cuda.kernels import Kernels
from tests.card import (
    KINDS,
    Differences,
    as_input,
    error,
    one_layer,
    randn,
    random_weight,
    rounded,
    rows_of,
)

pytestmark = pytest.mark.gpu
MOST = 64
MORE = (65, 100, 128, 129, 192, 193, 256)
"""In blocks of 64 or 128 tokens, one or several."""
SUMS = 1e-5
"""Relative error of a float32 sum of exact products, of either kind."""
ROUNDED = {"fp8": 2e-4, "bf16": 1e-3}
"""Also of a second matmul: its inputs now and then round the other way (11 or 8 bits)."""
MODELS = ["gemma-4-31b", "gemma-4-12b", "gemma-4-26b-a4b", "gemma-4-e4b"]


def linears(arch: Arch, wide: str) -> dict[tuple[int, int, str, str], None]:
    """n, k, kind, layout of every skinny GEMM; the head and what stays wide are bf16 always."""
    found: dict[tuple[int, int, str, str], None] = {}
    for layer in arch.layers:
        own = 0 if layer.kv_from is not None else 1 if layer.k_eq_v else 2
        width = layer.heads * layer.head_dim
        qkv = width + own * layer.kv_heads * layer.head_dim
        found[qkv, arch.hidden, wide, "plain"] = None
        found[arch.hidden, width, wide, "plain"] = None
        found[2 * layer.ffw, arch.hidden, wide, "gated"] = None
        found[arch.hidden, layer.ffw, wide, "plain"] = None
        if layer.moe:
            found[layer.moe.experts, arch.hidden, "bf16", "plain"] = None
    if arch.per_layer_input:
        found[arch.per_layer_input, arch.hidden, "bf16", "per layer"] = None
        found[arch.hidden, arch.per_layer_input, "bf16", "plain"] = None
        found[len(arch.layers) * arch.per_layer_input, arch.hidden, "bf16", "plain"] = None
    found[arch.vocab, arch.hidden, "bf16", "head"] = None
    return found


@pytest.mark.parametrize("wide", ["fp8", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_every_skinny_gemm(name, wide):
    """All M up to 64 and some more, each row at every place that M leaves it, 3 seeds."""
    arch = released(name)
    ops = Kernels(one_layer(arch, 0), 128, torch.bfloat16, KINDS)
    for n, k, kind, layout in linears(arch, wide):
        weight = random_weight(ops, (n, k), kind, "gated" if layout == "gated" else "plain")
        extra = randn(MORE[-1], n, seed=9) if layout == "per layer" else None

        def call(x: torch.Tensor, first: int, w=weight, layout=layout, kind=kind, extra=extra):
            given = as_input(x, kind)
            if layout == "gated":
                return rows_of(ops.gated(given, w.packed, kind), w.packed.n // 2, kind)
            if extra is not None:
                inputs = extra[first : first + len(x)]
                made = ops.gated_per_layer(given, w.packed, inputs, 0, "bf16")
                return rows_of(made, w.packed.n, "bf16")
            if layout == "head":
                return ops.head(given, w.packed, arch.softcap)
            return ops.linear(given, w.packed)

        same = Differences()
        for seed in range(3):
            x = randn(MOST, k, seed=seed)
            whole = call(x, 0)
            for m in range(1, MOST + 1):
                same.check(call(x[:m], 0), whole[:m])
                same.check(call(x[MOST - m :], MOST - m), whole[MOST - m :])
            for row in range(MOST):
                same.check(call(x[row : row + 1], row), whole[row : row + 1])
            for m in MORE:
                same.check(call(torch.cat([x, x, x, x])[:m], 0)[:MOST], whole[:m])
        assert same.none(), (n, k, kind, layout, int(same.count))
        few = 4
        exact = weight.times(rounded(x[:few], kind))
        if layout == "gated":
            left, right = exact.chunk(2, -1)
            exact = F.gelu(left, approximate="tanh") * right
        elif extra is not None:
            exact = F.gelu(exact, approximate="tanh") * extra[:few].double()
        elif layout == "head":
            exact = arch.softcap * torch.tanh(exact / arch.softcap)
        stored = layout in ("gated", "per layer")  # in 16 bits, for the next weight
        limit = {"fp8": 2**-11, "bf16": 2**-8}[kind] if stored else SUMS
        assert error(whole[:few], exact) <= limit, (n, k, kind, layout)
        del weight, exact


MOE = MoeSpec(128, 8, 704)


@pytest.fixture(scope="module")
def moe_ops() -> Kernels:
    return Kernels(one_layer(released("gemma-4-26b-a4b"), 0), 128, torch.bfloat16, KINDS)


def test_routes(moe_ops):
    hidden = moe_ops.arch.hidden
    h, scale = 3 * randn(256, hidden), 1 + 0.2 * randn(hidden, seed=1)
    per_expert = 1 + 0.2 * randn(128, seed=2)
    proj = random_weight(moe_ops, (128, hidden), "bf16", seed=3)

    def call(part):
        return moe_ops.route(part.clone(), scale, proj.packed, per_expert, MOE)

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
    numbers, shares = moe_ops.route(h, h[0], packed, torch.ones(128, device="cuda"), MOE)
    assert numbers.tolist() == [list(range(8))] * 2
    assert (shares == 0.125).all()


@pytest.mark.parametrize("picks", ["apart", "together"])
@pytest.mark.parametrize("kind", ["fp8", "bf16"])
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
        return moe_ops.experts(given, chosen, gate_up.packed, down.packed, MOE)

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
