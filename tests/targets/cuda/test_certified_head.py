"""Heads at half their bytes choose the same tokens: bounds that hold, candidates that suffice."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings, strategies as st

from specdec.core.types import Sampling
from targets.arch import released
from targets.cuda import candidates, certified, int8
from targets.cuda.load import CudaOptions, load_target
from targets.cuda.ops import Choosing, Linear, NarrowHead, Rows
from targets.cuda.reference import Reference
from targets.cuda.sampling import blank_table
from targets.sampling_params import Rules, set_row
from tests.targets.cuda.certified import FEW, WHOLE


@dataclass(frozen=True)
class Case:
    """A head, and inputs of its rows."""

    head: Linear
    narrow: NarrowHead
    x: torch.Tensor
    rows: Rows
    softcap: float | None
    ops: Reference

    def choosing(self, given: Sampling) -> Choosing:
        slots, vocab = len(self.rows.slot), self.head.n
        table = blank_table(slots, "cpu")
        bias = torch.zeros(slots, vocab)
        for slot in range(slots):
            set_row(table, slot, given, 0)
            for token, value in given.logit_bias:
                bias[slot, token] += value
        history = torch.zeros((slots, 16), dtype=torch.int32)
        return Choosing(Rules(bias, table, history), given.needs_sampler)

    def chosen(self, logits: torch.Tensor, choosing: Choosing) -> list[int]:
        spread = logits.view(*self.rows.tokens.shape, -1)
        return self.ops.choose(spread, choosing.rules, self.rows, choosing.needs_sampler).tolist()


def case(
    values: torch.Tensor, x: torch.Tensor, softcap: float | None = 30.0, batch: int = 1
) -> Case:
    ops = Reference(released("gemma-4-31b"))
    values, x = values.bfloat16(), x.bfloat16()
    tokens = torch.zeros((batch, len(x) // batch), dtype=torch.int32)
    start = torch.arange(batch, dtype=torch.int32) + 4
    rows = Rows(tokens, start, torch.arange(batch, dtype=torch.int32))
    head, narrow = ops.heads(values)
    assert narrow is not None
    return Case(head, narrow, x, rows, softcap, ops)


def random_case(seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((1500, 96), generator=generator) * 0.1
    return case(values, torch.randn((3, 96), generator=generator) * 3)


def screened(made: Case, choosing: Choosing) -> tuple[torch.Tensor, torch.Tensor]:
    """All logits, and the candidates'."""
    whole = made.ops.head(made.x, made.head, made.softcap)
    heads = made.head, made.narrow
    return whole, made.ops.candidates(made.x, heads, made.softcap, made.rows, choosing)


@pytest.mark.parametrize("name", FEW)
def test_candidates_suffice(name):
    choosing_of = FEW[name]
    for seed in range(3):
        made = random_case(seed)
        choosing = made.choosing(choosing_of)
        whole, few = screened(made, choosing)
        kept = few > -torch.inf
        assert made.chosen(few, choosing) == made.chosen(whole, choosing)
        assert (few[kept] == whole[kept]).all()
        assert kept.any(-1).all() and not kept.all()


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_not_certified_is_left_whole(name):
    made = random_case(1)
    whole, few = screened(made, made.choosing(WHOLE[name]))
    assert (whole == few).all()


@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 10**6),
    st.sampled_from([1e-6, 1e-2, 1.0, 30.0]),
    st.sampled_from([None, 30.0]),
    st.sampled_from(["plain", "twins", "outliers", "zeros", "steps"]),
)
def test_any_head_says_the_same(seed, scale, softcap, kind):
    """Equal rows, rows of one large value, rows of nothing, values of a few sizes only: ties and
    coarse groups, where the lowest number must win as ever."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((300, 70), generator=generator)
    if kind == "twins":
        values[150:] = values[:150]
    elif kind == "outliers":
        values[::7, 3] = 400.0
    elif kind == "zeros":
        values[::2] = 0.0
    elif kind == "steps":
        values = values.sign()
    made = case(values * scale, torch.randn((2, 70), generator=generator), softcap)
    for name in ("greedy", "gumbel", "gemma", "min-p"):
        choosing = made.choosing(FEW[name])
        whole, few = screened(made, choosing)
        assert made.chosen(few, choosing) == made.chosen(whole, choosing)


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1.0, 1e4])
def test_bounds_hold(scale):
    """In float64, and with room for sums in any order."""
    generator = torch.Generator().manual_seed(4)
    values = (torch.randn((400, 333), generator=generator) * scale).bfloat16()
    head, error = int8.quantise(values)
    narrow, values = head.narrow, head.values() * head.narrow.row[:, None].bfloat16()
    coarse = narrow.values().double() * narrow.row[:, None]
    x = torch.cat([torch.randn((20, 333), generator=generator), torch.eye(333)[:20]]).bfloat16()
    away = (x.double() @ values.double().T - x.half().double() @ coarse.T).abs()
    bound = error * certified.length(x)[:, None]
    assert (away <= bound).all()
    worst = (values.double() - coarse).norm(dim=1)  # an input that points where the error does
    assert (worst <= error).all() and (error < 1.3 * worst + 1e-3 * values.norm(dim=1)).all()


def test_codes_are_fine():
    """Within 0.7 % of a row, of sums 0.1 %; a large value is coarse for its 32 inputs alone."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn((64, 5376), generator=generator).bfloat16()
    values[32:, 7] = 60.0
    _, error = int8.quantise(values)
    share = error / values.float().norm(dim=1)
    assert (share[:32] < 0.007).all() and (share[32:] < 0.012).all()


def test_a_scale_has_few_bits():
    """So that kernels take 128 codes away within one rounding."""
    generator = torch.Generator().manual_seed(1)
    narrow = int8.quantise(torch.randn((50, 64), generator=generator).bfloat16())[0].narrow
    middle = narrow.scale.float() * (1024 + int8.MIDDLE)
    assert (middle.half().float() == middle).all()
    assert narrow.codes.min() >= 1


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1.0, 1e4])
def test_a_head_is_what_it_was_made_from(scale):
    """But for values that are less than one code, by up to 2^-15 of their group's largest."""
    generator = torch.Generator().manual_seed(2)
    values = (torch.randn((300, 333), generator=generator) * scale).bfloat16()
    values[7] = 0
    head, _ = int8.quantise(values)
    narrow = head.narrow
    kept = head.values() * narrow.row[:, None].bfloat16()
    again = int8.Int16.unpacked(head.packed(), narrow.row)
    assert torch.equal(again.values(), head.values()) and again.fine.shape == values.shape
    step = (narrow.scale.float() * narrow.row[:, None]).repeat_interleave(32, 1)[:, :333]
    large = values.float().abs() > step
    assert torch.equal(kept[large], values[large]) and large.float().mean() > 0.97
    assert ((kept.float() - values.float()).abs() <= step / 256).all()
    assert not kept[7].any()


def test_a_target_takes_the_candidates(tiny):
    """Greedy and sampled steps, bit for bit what the whole head chooses; log-probabilities and
    masks need all logits."""
    options = CudaOptions(slots=2, max_len=64, dtype="bfloat16", device="cpu")
    target = load_target(tiny["31b"], options)
    asked = []
    inner = target.ops.candidates
    target.ops.candidates = lambda *given: asked.append(1) or inner(*given)
    tokens = torch.tensor([[5, 6], [7, 8]], dtype=torch.int32)
    rows = Rows(tokens, torch.zeros(2, dtype=torch.int32), torch.arange(2, dtype=torch.int32))
    few = target.step(rows, False, False).chosen
    assert asked and few.tolist() == target.forward(rows, False).chosen.tolist()
    asked.clear()
    target.step(rows, False, True)
    target.step(rows, False, False, lambda: None)
    assert not asked


@pytest.mark.parametrize("batch", range(1, certified.MOST_ROWS + 1))
def test_screening_stages_rows_and_biases_of_their_sequences(batch: int) -> None:
    """However a batch of rows is cut, the biases of all sequences in it have their places."""
    for tokens in range(1, certified.MOST_ROWS // batch + 1):
        rows = batch * tokens
        most, quads = candidates.staged(batch, tokens)
        firsts = range(0, rows, most)
        sequences = [
            (min(first + most, rows) - 1) // tokens - first // tokens + 1 for first in firsts
        ]
        assert 1 <= most <= rows and most + max(sequences) <= quads <= candidates.STAGED
