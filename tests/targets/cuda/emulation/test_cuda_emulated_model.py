"""Whole tiny models on our own kernels, without a GPU: a token's logits have the same bits however
many tokens are fed at a time, and are near the references'."""

from __future__ import annotations

import pytest
import torch

from targets.cuda import experts
from targets.cuda.reference import Reference
from targets.model_folder import read_arch
from tests.support.tiny import VARIANTS, write_tiny
from tests.targets.cuda.card import KINDS, error
from tests.targets.cuda.emulation.emulated import Kernels
from tests.targets.cuda.runner import Runner

pytestmark = pytest.mark.usefixtures("eager")
NEAR = 0.05
"""Relative error of logits: models as small as these amplify how sums are rounded."""
SORTED = {"fp8": 0.01, "int4": 0.05}
"""The same of two kernels for experts; those for few rows round inputs of 4 bits to integers."""
ROUTED = 0.1
"""The same where a router picks another expert now and then."""


def same_and_near(tmp_path, variant: str, dtype: str, cuts: list[tuple[int, ...]]) -> None:
    write_tiny(tmp_path, variant)
    arch = read_arch(tmp_path)
    ours = Runner(tmp_path, Kernels(arch, 128, torch.bfloat16, KINDS), dtype, "cpu")
    first, *others = map(ours.feed, cuts)
    assert all(torch.equal(first, other) for other in others)
    reference = Runner(tmp_path, Reference(arch), dtype, "cpu").feed(cuts[0])
    assert error(first, reference) <= (ROUTED if arch.moe else NEAR)


def test_a_mixture_of_4_bits(tmp_path):
    same_and_near(tmp_path, "26b-a4b", "int4", [(5,), (1, 1, 1, 1, 1), (2, 3)])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp8", "int4"])
def test_a_prompt_whose_rows_are_sorted_by_expert(tmp_path, monkeypatch, dtype):
    """Its logits are near those of calls whose rows are not."""
    monkeypatch.setattr(experts, "SORTED_FROM_TOKENS", 8)
    write_tiny(tmp_path, "26b-a4b")
    arch = read_arch(tmp_path)
    kernels = Kernels(arch, 128, torch.bfloat16, KINDS)
    run, sorted_calls = kernels.experts.run_sorted, []
    monkeypatch.setattr(
        kernels.experts, "run_sorted", lambda *given: sorted_calls.append(1) or run(*given)
    )
    runner = Runner(tmp_path, kernels, dtype, "cpu")
    whole, parts = runner.feed((8,)), runner.feed((3, 5))
    assert error(whole, parts) <= SORTED[dtype]
    assert len(sorted_calls) == len(arch.layers)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8", "int4"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_model(tmp_path, variant, dtype):
    same_and_near(tmp_path, variant, dtype, [(8, 8), (1,) * 16, (5, 4, 2, 5)])
