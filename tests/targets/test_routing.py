"""Random mixtures of experts: rows overlap in their picks as configured, and picks are counted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from specdec.core.errors import UserError
from specdec.core.types import Sequence
from targets.arch import MoeSpec, released
from targets.cuda.load import CudaOptions, random_target
from targets.cuda.roofline import expert_share
from targets.routing import ROWS, correlation_for, experts_picked

MOE = MoeSpec(64, 4, 16)
WHOLE = released("gemma-4-26b-a4b")
LAYER = replace(
    WHOLE.layers[0], heads=2, kv_heads=1, head_dim=64, ffw=64, moe=MOE, rope=WHOLE.layers[0].rope
)
ARCH = replace(WHOLE, hidden=512, vocab=2048, layers=(LAYER,) * 3)


def test_rows_that_pick_by_chance_or_all_alike():
    assert experts_picked(MOE, 1) == 4
    assert experts_picked(MOE, 1, 0.7) == 4
    assert experts_picked(MOE, ROWS) == pytest.approx(64 * (1 - (15 / 16) ** ROWS))
    assert experts_picked(MOE, ROWS, 1e-6) == pytest.approx(experts_picked(MOE, ROWS), rel=0.02)
    assert experts_picked(MOE, ROWS, 1 - 1e-9) == pytest.approx(4, rel=0.01)
    assert expert_share(MOE, ROWS, correlation=0.5) * 64 == experts_picked(MOE, ROWS, 0.5)
    for overlap in (0.2, 0.38, 0.6):
        correlation = correlation_for(overlap, MOE)
        assert 1 - experts_picked(MOE, ROWS, correlation) / (ROWS * 4) == pytest.approx(
            overlap, abs=5e-3
        )
    for overlap in (0.05, 0.8, 1.0):
        with pytest.raises(UserError, match=r"--routing-overlap must be 0\.1. .* to below 0\.80"):
            correlation_for(overlap, MOE)


@pytest.mark.parametrize("overlap", [None, 0.38])
def test_a_random_mixture_picks_as_alike_as_asked(monkeypatch, overlap):
    """Layer after layer, of a target that is made so."""
    options = CudaOptions(slots=1, max_len=64, k=7, device="cpu", routing_overlap=overlap)
    target = random_target(ARCH, options)
    inner, picked = target.ops.route, []

    def route(*given):
        chosen = inner(*given)
        picked.append(chosen[0])
        return chosen

    monkeypatch.setattr(target.ops, "route", route)
    found = []
    for seed in range(12):
        tokens = np.random.default_rng(seed).integers(3, ARCH.vocab, 20 + ROWS)
        seq = Sequence(tokens[:21].tolist(), max_tokens=9)
        seq.slot = 0
        target.prefill(seq, 0, 20)
        picked.clear()
        target.verify([seq], tokens[None, 21:])
        found += [len(torch.unique(numbers)) for numbers in picked]
    assert len(found) == 12 * len(ARCH.layers)
    expected = experts_picked(MOE, ROWS, target.plan.correlation)
    assert np.mean(found) == pytest.approx(expected, rel=0.1)
    assert (overlap is None) == (expected > 17)
