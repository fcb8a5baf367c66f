"""gemm.cu without a GPU: each kind of weight near float64, and a row the same in any company."""

from __future__ import annotations

import pytest
import torch

from targets.cuda.gemm import Gemm
from tests.card import as_input, error, rounded
from tests.emulated import Launcher
from tests.emulated_weights import KINDS, drawn, randn

SHAPES = [(96, 352, "plain"), (176, 768, "row_parallel")]
PROCESSORS = 2


@pytest.fixture(scope="module")
def linear() -> Gemm:
    return Gemm(Launcher(), PROCESSORS, 1.0)


def same_and_near(linear: Gemm, kind: str, shape: tuple[int, int, str], counts) -> None:
    """The last rows of as many as the greatest count, alone and with the others."""
    *size, layout = shape
    weight = drawn(tuple(size), kind, 1)
    packed = weight.packed(linear, layout)
    x = randn(max(counts), size[1], seed=2)
    whole = linear.linear(as_input(x, kind, layout), packed)
    assert error(whole, rounded(x, kind) @ weight.meant.double().T) <= 1e-6
    for rows in counts:
        few = linear.linear(as_input(x[-rows:], kind, layout), packed)
        assert torch.equal(few, whole[-rows:]), rows


def test_a_row_is_itself(linear):
    same_and_near(linear, "int4", SHAPES[0], (5, 1))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape[2])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_themselves_and_near(linear, kind, shape):
    same_and_near(linear, kind, shape, (16, 1, 2, 4, 5, 8, 11))
