"""sample.cu without a GPU, a cluster of CTAs a row: it chooses what the reference chooses."""

from __future__ import annotations

import pytest
import torch

from targets.cuda.sampler import Sampler
from tests.choosing_cases import KINDS, case_of
from tests.emulated import Launcher, just_written


@pytest.mark.parametrize(
    "kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])]
)
def test_choices_are_the_references(kind):
    case = case_of(4098, 1, kind, "cpu")
    choose = Sampler(Launcher(), torch.device("cpu")).choose
    just_written(case.logits)
    assert torch.equal(choose(*case, True), case.chosen())
    just_written(case.logits)
    assert torch.equal(choose(*case, False), case.greedy())
