"""On the card: e4m3 inputs are the reference's to the bit, and rows of any call the rows alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from targets.arch import released
from targets.cuda.formulas import as_e4m3, rms
from targets.cuda.kernels import Kernels
from targets.cuda.load import CudaOptions, random_target
from targets.cuda.ops import Closing, Opening, Rows
from targets.cuda.plan import FINE
from targets.cuda.tiles import ACTIVATION_SCALE, EIGHTHS
from targets.cuda.w8a8 import W8A8
from tests.targets.cuda.card import (
    KINDS,
    Differences,
    as_input,
    error,
    one_layer,
    randn,
    random_weight,
    rows_of,
)

pytestmark = pytest.mark.gpu
ROWS = (1, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 385, 512, 700)
"""In blocks of 8 to 256 tokens, one or several."""


@pytest.fixture(scope="module")
def ops() -> Kernels:
    return Kernels(one_layer(released("gemma-4-31b"), 0), 128, torch.bfloat16, KINDS)


@pytest.mark.parametrize("k", [48, 1000, 5376, 8192, 21504, 24576])
def test_rows_become_inputs(ops, k):
    """Of attention and of gated layers: f16 of value / 32."""
    narrow = W8A8(ops._launch, ops.processors)
    x = randn(ROWS[-1], k) * torch.logspace(-3, 4, ROWS[-1], device="cuda")[:, None]
    x[3] = 0.0
    rows = (x / ACTIVATION_SCALE).half()
    exact = as_e4m3(rows.float(), EIGHTHS) * ACTIVATION_SCALE
    for m in ROWS:
        assert torch.equal(rows_of(narrow.quantise(rows[:m]), k, "w8a8"), exact[:m]), m


@pytest.mark.parametrize("hidden", [48, 1536, 5376, 8192])
def test_norms_become_inputs(hidden):
    """Near the reference, as its norm may differ in the last bit; bitwise the row alone."""
    arch = replace(one_layer(released("gemma-4-31b"), 0), hidden=hidden)
    ops = Kernels(arch, 128, torch.bfloat16, {"w8a8"})
    h, branch = randn(ROWS[-1], hidden), randn(ROWS[-1], hidden, seed=1)
    post, pre = (1 + 0.1 * randn(hidden, seed=s) for s in (2, 3))
    scalar = torch.tensor([0.7], device="cuda")

    def call(m: int) -> torch.Tensor:
        x = ops.norm(h[:m].clone(), Opening(pre, "w8a8"), Closing(branch[:m], post, scalar))
        return rows_of(x, hidden, "w8a8")

    whole, same = call(ROWS[-1]), Differences()
    exact = as_e4m3(rms((h + rms(branch, post, ops.arch.eps)) * scalar, pre, ops.arch.eps))
    assert error(whole, exact.double()) < 2e-3
    for m in ROWS:
        same.check(call(m), whole[:m])
    assert same.none()


@pytest.mark.parametrize("shape", [(5376, 8192), (5376, 21504), (18432, 5376), (43008, 5376)])
def test_long_calls(ops, shape):
    """In blocks of 128 and 256 tokens: the same rows at other places."""
    layout = {43008: "gated", 5376: "row_parallel"}.get(shape[0], "plain")
    weight = random_weight(ops, shape, "w8a8", layout)
    x, same = randn(ROWS[-1], shape[1]), Differences()

    def call(rows: torch.Tensor) -> torch.Tensor:
        given = as_input(rows, "w8a8", layout)
        if layout != "gated":
            return ops.linear(given, weight.packed)
        return rows_of(ops.gated(given, weight.packed, "w8a8"), shape[0] // 2, "w8a8")

    whole = call(x)
    if shape[0] == ops.arch.hidden:
        h, ones = torch.zeros_like(whole), torch.ones_like(whole[0])
        branch = ops.branch(as_input(x, "w8a8", layout), weight.packed)
        ops.norm(h, Opening(None, "bf16"), Closing(branch, ones))
        assert error(h, rms(whole, ones, ops.arch.eps).double()) < 1e-5
    for m in ROWS:
        same.check(call(x[:m]), whole[:m])
        same.check(call(x[len(x) - m :]), whole[len(x) - m :])
    assert same.none()


@pytest.mark.parametrize("name", ["31b", "12b", "26b-a4b", "e4b"])
def test_fp8_rounds_the_inputs_of_many_tokens(name):
    """fp8 computes a chunk of more than FINE tokens as fp8-w8a8 does, although that one deals its
    tiles differently; and a captured chunk equals a launched one."""
    arch = one_layer(released(f"gemma-4-{name}"), 0)
    options = CudaOptions(slots=1, max_len=256)
    fine, rounded = (
        random_target(arch, replace(options, dtype=dtype)) for dtype in ("fp8", "fp8-w8a8")
    )
    text = torch.randint(0, arch.vocab, (1, 128), dtype=torch.int32, device="cuda")
    place = torch.zeros((2, 1), dtype=torch.int32, device="cuda")
    for tokens in (FINE, FINE + 1, 100, 128):
        rows = Rows(text[:, :tokens], *place)
        ours, theirs = (target.short(rows).logits for target in (fine, rounded))
        assert torch.equal(ours, theirs) == (tokens > FINE), tokens
        (captured,) = fine._chunk(rows, 0, 0, ends=True)
        assert torch.equal(captured.logits, ours), tokens
