"""The sampler's kernel chooses what the reference chooses, whichever way it takes: few tokens or
many, those that a bound leaves, each compared with all others, or bit by bit."""

from __future__ import annotations

import pytest
import torch

from specdec.core.types import Sampling
from targets.cuda import sampling
from targets.cuda.launch import Launcher, Library
from targets.cuda.ops import Rows
from targets.cuda.sampler import SAMPLE, Sampler
from targets.sampling_params import Rules, set_row
from tests.card import randn

pytestmark = pytest.mark.gpu
REQUESTS = [
    Sampling(),
    Sampling(1.0, seed=3),
    Sampling(0.9, top_k=1, seed=7),
    Sampling(1.0, top_k=64, top_p=0.95, seed=1),
    Sampling(0.8, top_k=128, top_p=0.5, min_p=0.001, seed=2),
    Sampling(1.0, top_k=256, seed=2**40),
    Sampling(1.2, top_k=700, top_p=0.9, seed=5),
    Sampling(0.7, top_p=0.8, seed=6),
    Sampling(1.0, top_k=1, top_p=1e-6, seed=8),
    Sampling(1.0, min_p=0.1, seed=9),
    Sampling(1.0, top_k=40, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.5, seed=4),
]
TOKENS = 3


@pytest.mark.parametrize("vocab", [4096, 4098, 262144])
@pytest.mark.parametrize("kind", ["peaked", "even", "tied", "few"])
def test_choices_are_the_references(vocab, kind):
    slots = len(REQUESTS)
    table = sampling.blank_table(slots, "cuda")
    for slot, request in enumerate(REQUESTS):
        set_row(table, slot, request, 9)
    logits = randn(slots, TOKENS, vocab)
    if kind == "tied":
        logits = (logits * 4).round() / 2
    elif kind == "few":
        logits = torch.where(logits > 2, logits, -torch.inf)
    else:
        logits *= {"peaked": 5, "even": 0.01}[kind]
    bias = torch.zeros(slots, vocab, device="cuda")
    bias[:, 7], bias[:, 11] = 1.0, -torch.inf
    whole = lambda high, *shape: torch.randint(0, high, shape, device="cuda").int()  # noqa: E731
    rules = Rules(bias, table, whole(vocab, slots, 40))
    slot = torch.randperm(slots, device="cuda").int()
    rows = Rows(whole(9, slots, TOKENS), whole(30, slots), slot)
    choose = Sampler(Launcher(Library({SAMPLE})), torch.device("cuda")).choose
    expected = sampling.choose(logits, bias, table, rules.history, rows)
    assert torch.equal(choose(logits, rules, rows, True), expected)
    assert torch.equal(
        choose(logits, rules, rows, False), sampling.choose_greedy(logits, bias, rows)
    )
