"""On the card: attention's rows are bitwise the rows alone with any of the kernels, and near the
result in float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from targets.arch import LayerSpec, Rope
from targets.cuda import attention
from targets.cuda.kernels import Kernels
from tests.targets.cuda.attention_cases import POSITIONS, Case, make_alone, one_layer_of
from tests.targets.cuda.card import KINDS, Differences, error

pytestmark = pytest.mark.gpu

SLIDING = LayerSpec(1024, 32, 16, 256, Rope(1e4, 128), False, None, 256, None)
GLOBAL = LayerSpec(None, 32, 4, 512, Rope(1e6, 64), True, None, 256, None)
LONE = LayerSpec(None, 16, 1, 512, Rope(1e6, 64), True, None, 256, None)
UNEQUAL = LayerSpec(512, 8, 2, 256, Rope(1e4, 128), False, None, 256, None)
ODD = LayerSpec(20, 4, 2, 16, Rope(1e4, 8), False, None, 256, None)
LAYERS = [SLIDING, GLOBAL, LONE, UNEQUAL, ODD]
STARTS = [0, 1, 63, 119, 120, 121, 126, 127, 128, 129, 255, 256, 511, 1020, 1023, 1151, 1152, 1405]
"""Around edges of chunks, of windows, and where rings wrap."""
ATTENTION = {torch.bfloat16: 1e-2, torch.float8_e4m3fn: 2e-3}
"""Queries and shares have 8 bits beside a bf16 cache, 11 beside an FP8 one."""


def case_of(layer: LayerSpec, kv: torch.dtype) -> Case:
    ops = Kernels(one_layer_of(layer), POSITIONS, kv, KINDS)
    return Case(layer, kv, STARTS, ops.attention, "cuda")


@pytest.mark.parametrize("kv", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("layer", LAYERS)
def test_attention(layer, kv):
    """A row of a call is the row alone, up to a short prefill chunk; and near float64."""
    case = case_of(layer, kv)
    for tokens in (*range(1, 9), 17, 40):
        together = case.all_together(tokens)
        kept, same = case.stored(), Differences()
        for row in range(len(together)):
            same.check(case.alone(row, tokens), together[row : row + 1])
        for ours, theirs in zip(case.stored(), kept, strict=True):
            same.check(ours, theirs)  # stored alike
        assert same.none(), (tokens, int(same.count))
        if tokens in (1, 8):
            assert error(together, case.exact(tokens)) <= ATTENTION[kv]


@pytest.mark.parametrize("kv", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("layer", LAYERS)
def test_fused_attention_equals_split(layer, kv, monkeypatch):
    """Whichever kernels serve a call: the same bits, in its output and in the cache."""
    case, same = case_of(layer, kv), Differences()
    for tokens in (1, 3, 5, 8, 16, 17, 128):
        monkeypatch.setattr(attention, "FUSED_FROM_CTAS", 1)
        fused, kept = case.all_together(tokens), case.stored()
        for most, tiles in product((0, 48), ((1,), attention.TILES, (4,))):
            case.fill()
            with monkeypatch.context() as patch:  # the next fused call has tiles of its own choice
                patch.setattr(attention, "FUSED_FROM_CTAS", 10**9)
                make_alone(patch, most)
                patch.setattr(attention, "TILES", tiles)
                same.check(case.all_together(tokens), fused)
            for ours, theirs in zip(case.stored(), kept, strict=True):
                same.check(ours, theirs)
    assert same.none(), int(same.count)


@pytest.mark.parametrize("fused_from", [1, 10**9])
def test_attention_leaves_rows_that_sit_out_alone(fused_from, monkeypatch):
    monkeypatch.setattr(attention, "FUSED_FROM_CTAS", fused_from)
    case, same = case_of(SLIDING, torch.bfloat16), Differences()
    whole, kept = case.all_together(2), case.stored()
    slots = [slot if slot % 3 else -1 for slot in range(len(STARTS))]
    given = case.call(case.qkv(2), case.rows(2, STARTS, slots))
    for slot in slots:
        if slot >= 0:
            same.check(given[2 * slot : 2 * slot + 2], whole[2 * slot : 2 * slot + 2])
    for ours, theirs in zip(case.stored(), kept, strict=True):
        same.check(ours, theirs)
    assert same.none(), int(same.count)
