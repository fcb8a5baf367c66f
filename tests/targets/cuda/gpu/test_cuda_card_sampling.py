"""The sampler's kernel chooses what the reference chooses, whichever way it takes: few tokens or
many, those that a bound leaves, each compared with all others, or bit by bit."""

from __future__ import annotations

import pytest
import torch

from targets.cuda.launch import Launcher, Library
from targets.cuda.sampler import SAMPLE, Sampler
from tests.targets.cuda.choosing_cases import KINDS, case_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("vocab", [4096, 4098, 262144])
@pytest.mark.parametrize("kind", KINDS)
def test_choices_are_the_references(vocab, kind):
    case = case_of(vocab, 3, kind, "cuda")
    choose = Sampler(Launcher(Library({SAMPLE})), torch.device("cuda")).choose
    assert torch.equal(choose(*case, True), case.chosen())
    assert torch.equal(choose(*case, False), case.greedy())
