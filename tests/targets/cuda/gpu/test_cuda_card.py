"""On the card: row r of any call is bitwise the row alone, and near the result in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from targets.arch import released
from targets.cuda.kernels import Kernels
from tests.targets.cuda.card import (
    KINDS,
    Differences,
    error,
    linears,
    one_layer,
    outputs,
    randn,
    random_weight,
    rounded,
    stored,
)

pytestmark = pytest.mark.gpu
MOST = 64
MORE = (65, 100, 128, 129, 192, 193, 256)
"""In blocks of 64, 128 or 256 tokens, one or several."""
SUMS = dict.fromkeys(("fp8", "int4", "uint4", "nvfp4", "bf16"), 1e-5) | {"w8a8": 5e-3}
"""Relative error of a float32 sum of exact products. Tensor cores add products of e4m3 with 13 bits
or so: little beside what rounding inputs to 4 bits does."""
STORED = dict.fromkeys(("fp8", "int4", "uint4", "nvfp4"), 2**-11)
STORED |= {"bf16": 2**-8, "w8a8": 2**-5}
"""Where the output is the next weight's input."""
MODELS = ["gemma-4-31b", "gemma-4-12b", "gemma-4-26b-a4b", "gemma-4-e4b"]


@pytest.mark.parametrize("wide", ["fp8", "int4", "uint4", "nvfp4", "w8a8", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_every_skinny_gemm(name, wide):
    """All M up to 64 and some more, each row at every place that M leaves it, 3 seeds."""
    arch = released(name)
    ops = Kernels(one_layer(arch, 0), 128, torch.bfloat16, KINDS)
    for n, k, kind, layout in linears(arch, wide):
        weight = random_weight(ops, (n, k), kind, stored(layout))
        extra = randn(MORE[-1], n, seed=9) if layout == "per layer" else None

        def call(x: torch.Tensor, first: int, w=weight, layout=layout, extra=extra):
            own = None if extra is None else extra[first : first + len(x)]
            return outputs(ops, w, layout, x, own)

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
        exact = weight.times(rounded(x[:few], kind, layout))
        if layout == "gated":
            left, right = exact.chunk(2, -1)
            exact = F.gelu(left, approximate="tanh") * right
        elif extra is not None:
            exact = F.gelu(exact, approximate="tanh") * extra[:few].double()
        elif layout == "head":
            exact = arch.softcap * torch.tanh(exact / arch.softcap)
        narrow = layout in ("gated", "per layer")  # in 16 bits, for the next weight
        limit = (STORED if narrow else SUMS)[kind]
        assert error(whole[:few], exact) <= limit, (n, k, kind, layout)
        del weight, exact
