"""Whole tiny models on our own kernels, without a GPU: a token's logits have the same bits however
many tokens are fed at a time, and are near the references'."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specdec.core.pictures import place_ids
from targets.cuda import experts
from targets.cuda.cache import make_cache
from targets.cuda.graphs import padded
from targets.cuda.model import decode
from targets.cuda.ops import Ops, Rows
from targets.cuda.reference import Reference
from targets.model_folder import read_arch
from tests.support.tiny import VARIANTS, write_tiny
from tests.targets.cuda.card import KINDS, error, randn
from tests.targets.cuda.emulation.emulated import Kernels
from tests.targets.cuda.runner import IDS, Runner

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


@pytest.mark.parametrize("variant", ["31b", pytest.param("e4b", marks=pytest.mark.slow)])
def test_a_call_with_a_picture(tmp_path, variant):
    """Its rows are near the references', and have the same bits where the call is padded."""
    write_tiny(tmp_path, variant)
    arch, tokens, picture = read_arch(tmp_path), 7, range(2, 6)
    ids = IDS[:1, :tokens].copy()
    ids[0, picture] = place_ids(picture[0], len(picture))
    seen = [picture[-1] if t in picture else t for t in range(tokens)] if variant == "31b" else None
    fed = Rows(
        *(torch.tensor(v, dtype=torch.int32) for v in (ids, [0], [1])),
        soft=randn(tokens, arch.hidden, device="cpu").bfloat16(),
        reach=None if seen is None else torch.tensor([seen], dtype=torch.int32),
    )

    def logits(ops: Ops, rows: Rows) -> torch.Tensor:
        runner = Runner(tmp_path, ops, "bfloat16", "cpu")
        cache = make_cache(arch, 3, 64, 32, torch.bfloat16, "cpu")
        out = decode(runner.weights, arch, cache, rows, ops).logits
        assert out is not None
        return out[:tokens]

    kernels = Kernels(arch, 128, torch.bfloat16, KINDS)
    found, exact = logits(kernels, fed), logits(Reference(arch), fed)
    assert error(found, exact) <= NEAR
    assert torch.equal(logits(kernels, padded(fed)), found)
    for other in (replace(fed, soft=None), replace(fed, reach=None)):
        changed = not torch.equal(logits(Reference(arch), other), exact)
        assert changed == (other.soft is None or variant == "31b")


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
