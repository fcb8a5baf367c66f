"""gemm.cu without a GPU: each kind of weight near float64, and a row the same in any company."""

from __future__ import annotations

import pytest
import torch

from targets.cuda import gemm, tiles
from targets.cuda.gemm import Gemm
from tests.targets.cuda.card import as_input, error, rounded
from tests.targets.cuda.emulation.emulated import Launcher, just_written
from tests.targets.cuda.emulation.emulated_weights import KINDS, drawn, randn

SHAPES = [(176, 1056, "plain"), (176, 2304, "row_parallel")]
"""Of two passes of three steps or more."""
ONE_STEP = 96, 352, "plain"
"""A shape with a single step: its sums reuse that step's memory."""
PROCESSORS = 2
RING_BYTES = 24 << 10
"""Of a ring of two or three stages, which turns."""


@pytest.fixture(scope="module")
def linear() -> Gemm:
    return Gemm(Launcher(), PROCESSORS, 1.0)


def same_and_near(linear: Gemm, kind: str, shape: tuple[int, int, str], counts) -> None:
    """The last rows of as many as the greatest count, alone and with the others."""
    *size, layout = shape
    weight = drawn(tuple(size), kind, 1)
    packed = weight.packed(linear, layout)
    x = randn(max(counts), size[1], seed=2)

    def outputs(rows: torch.Tensor) -> torch.Tensor:
        given = as_input(rows, kind, layout)
        just_written(given.data)
        return linear.linear(given, packed)

    whole = outputs(x)
    assert error(whole, rounded(x, kind) @ weight.meant.double().T) <= 1e-6
    for rows in counts:
        assert torch.equal(outputs(x[-rows:]), whole[-rows:]), rows


@pytest.mark.parametrize("shape", [SHAPES[0], ONE_STEP], ids=["two-passes", "one-step"])
def test_a_row_is_itself(linear, shape):
    same_and_near(linear, "int4", shape, (5, 1))


def test_a_row_is_itself_where_the_ring_turns(linear, monkeypatch):
    monkeypatch.setattr(gemm, "RING_BYTES", RING_BYTES)
    same_and_near(linear, "int4", SHAPES[0], (5, 1))


def test_shapes_have_what_they_are_for():
    """Whatever else decides of a schedule."""
    for n, k, layout in SHAPES:
        plan = tiles.schedule(n, k, "int4", layout, tiles.k_groups(n, layout), PROCESSORS)
        assert plan.passes == 2 and plan.steps >= 3
        assert gemm.few_stages(plan, "int4", 1)[0] > plan.steps


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape[2])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_themselves_and_near(linear, kind, shape):
    same_and_near(linear, kind, shape, (16, 1, 2, 4, 5, 8, 11))
