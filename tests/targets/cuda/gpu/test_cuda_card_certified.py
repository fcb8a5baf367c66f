"""On the card: heads at half their bytes choose what whole heads choose, with the same bits."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from targets.arch import released
from targets.cuda import certified
from targets.cuda.candidates import ROOM
from targets.cuda.kernels import Kernels
from targets.cuda.ops import Choosing, Linear, NarrowHead, Rows
from targets.cuda.sampling import blank_table
from targets.sampling_params import Rules, set_row
from tests.targets.cuda.card import KINDS, as_input, one_layer, randn
from tests.targets.cuda.certified import FEW, WHOLE

pytestmark = pytest.mark.gpu

SHAPES = [(262144, 5376), (262144, 2560), (4096, 256), (1004, 72), (270000, 128)]
"""Of released models, ones with k groups and odd rows, and more words than threads take at once."""


@cache
def ops_of() -> Kernels:
    return Kernels(one_layer(released("gemma-4-31b"), 0), 128, torch.bfloat16, KINDS)


@cache
def heads_of(shape: tuple[int, int]) -> tuple[Linear, NarrowHead]:
    values = randn(*shape, seed=3).mul_(2 * shape[1] ** -0.5).bfloat16()
    values[shape[0] // 2 :: 5] = values[: len(values[shape[0] // 2 :: 5])]  # twins: ties
    head, narrow = ops_of().heads(values)
    assert narrow is not None
    return head, narrow


def choosing_of(given: list, vocab: int) -> Choosing:
    table, bias = blank_table(len(given), "cuda"), torch.zeros(len(given), vocab, device="cuda")
    for slot, one in enumerate(given):
        set_row(table, slot, one, 0)
        for token, value in one.logit_bias:
            bias[slot, token] += value
    history = torch.zeros((len(given), 64), dtype=torch.int32, device="cuda")
    return Choosing(Rules(bias, table, history), any(one.needs_sampler for one in given))


def rows_of(batch: int, tokens: int, idle: bool = False) -> Rows:
    def whole(*shape):
        return torch.zeros(shape, dtype=torch.int32, device="cuda")

    slot = torch.arange(batch, dtype=torch.int32, device="cuda")
    if idle:
        slot[-1] = -1
    return Rows(whole(batch, tokens), whole(batch) + 7, slot)


def both(shape: tuple[int, int], rows: Rows, choosing: Choosing, scale: float, softcap):
    """The whole head's logits and the candidates', and what is chosen by each."""
    ops, heads, m = ops_of(), heads_of(shape), rows.tokens.numel()
    x = as_input(randn(m, shape[1], seed=m) * scale, "bf16")
    whole = ops.head(x, heads[0], softcap)
    few = ops.candidates(x, heads, softcap, rows, choosing)
    picked = [
        ops.choose(
            logits.view(*rows.tokens.shape, -1), choosing.rules, rows, choosing.needs_sampler
        )
        for logits in (whole, few)
    ]
    return whole, few, picked


@pytest.mark.parametrize("softcap", [30.0, None])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FEW)
def test_candidates_suffice(shape, name, softcap):
    for batch, tokens, scale in (
        (1, 1, 1.0),
        (1, 8, 1.0),
        (3, 5, 4.0),
        (16, 1, 0.01),
        (2, 8, 1.0),
        (2, 1, 60.0),
    ):
        rows = rows_of(batch, tokens)
        choosing = choosing_of([FEW[name]] * batch, shape[0])
        whole, few, picked = both(shape, rows, choosing, scale, softcap)
        kept = few > -torch.inf
        assert torch.equal(*picked)
        assert torch.equal(few[kept], whole[kept])


def test_candidates_are_few():
    """Even with a head's logits as uniform as random ones there are hundreds, of 262,144."""
    ops, shape = ops_of(), SHAPES[0]
    for name, most in (("greedy", 300), ("gumbel", 300), ("gemma", 2500)):
        rows, choosing = rows_of(1, 5), choosing_of([FEW[name]], shape[0])
        x = as_input(randn(5, shape[1]), "bf16")
        _, found, count = ops.screened(x, heads_of(shape)[1], 30.0, rows, choosing)
        assert found.shape == (5, ROOM) and 0 < int(count.min()) and int(count.max()) < most


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_not_certified_is_whole(name):
    shape = SHAPES[1]
    rows, choosing = rows_of(2, 3), choosing_of([FEW["greedy"], WHOLE[name]], shape[0])
    whole, few, picked = both(shape, rows, choosing, 1.0, 30.0)
    assert torch.equal(whole, few) and torch.equal(*picked)


def test_idle_rows_and_full_rooms():
    """An idle row needs no logits; equal logits, or inputs beyond bounds, need the whole head."""
    shape = SHAPES[1]
    choosing = choosing_of([FEW["gemma"]] * 3, shape[0])
    whole, few, picked = both(shape, rows_of(3, 2, idle=True), choosing, 1.0, 30.0)
    assert torch.equal(picked[0][:2], picked[1][:2]) and not torch.equal(whole[:4], few[:4])
    for scale in (0.0, 1e5):
        whole, few, picked = both(shape, rows_of(3, 2), choosing, scale, 30.0)
        assert torch.equal(whole, few) and torch.equal(*picked)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bounds_hold_on_the_tensor_cores(shape):
    ops, (head, narrow) = ops_of(), heads_of(shape)
    for m in (1, 2, 8, 16):
        rows = randn(m, shape[1], seed=m).bfloat16()
        x = as_input(rows.float(), "bf16")
        away = (ops.linear(x, head) - ops.linear(x, narrow.weight)).abs()
        assert (away <= narrow.error * certified.length(rows)[:, None]).all()
        assert away.max() > 0
