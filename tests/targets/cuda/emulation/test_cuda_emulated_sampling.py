"""sample.cu without a GPU, a cluster of CTAs a row: it chooses what the reference chooses."""

from __future__ import annotations

import pytest
import torch

from specdec.core.types import Sampling
from targets.cuda import sampling
from targets.cuda.ops import Rows
from targets.cuda.sampler import Sampler
from targets.sampling_params import Rules, set_row
from tests.targets.cuda.choosing_cases import KINDS, case_of
from tests.targets.cuda.emulation.emulated import Launcher, just_written


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


def test_every_occurrence_is_counted():
    """Each word that occurred has a logit that its penalty just takes back, so that one occurrence
    missed anywhere makes that word the choice."""
    vocab, length, draw = 4098, 1500, torch.Generator().manual_seed(0)
    history = torch.randint(0, vocab, (1, length), generator=draw).int()
    counts = torch.bincount(history[0], minlength=vocab)
    logits = torch.where(counts > 0, counts.float(), -torch.inf)[None, None].contiguous()
    best = int(history[0, 700])
    logits[0, 0, best] += 0.5
    table = sampling.blank_table(1, torch.device("cpu"))
    set_row(table, 0, Sampling(frequency_penalty=1.0), 0)
    zero = torch.zeros(1, dtype=torch.int32)
    rows = Rows(history[:, -1:].contiguous(), zero + length - 1, zero)
    rules = Rules(torch.zeros(1, vocab), table, history)
    choose = Sampler(Launcher(), torch.device("cpu")).choose
    for _ in range(4):
        assert choose(logits, rules, rows, True).tolist() == [[best]]


def test_a_few_words_that_are_about_as_likely():
    """Those that top-k leaves, or of more of them what top-p leaves: any warp may hold the one
    drawn."""
    vocab, slots, draw = 1024, 16, torch.Generator().manual_seed(0)
    logits = torch.randn((slots, 1, vocab), generator=draw) * 0.01
    table = sampling.blank_table(slots, torch.device("cpu"))
    for slot in range(slots):
        top = {"top_k": 300, "top_p": 0.2} if slot % 2 else {"top_k": 40}
        set_row(table, slot, Sampling(1.0, seed=slot, **top), 0)
    zeros = torch.zeros(slots, dtype=torch.int32)
    rows = Rows(zeros[:, None].contiguous(), zeros, torch.arange(slots).int())
    rules = Rules(torch.zeros(slots, vocab), table, zeros[:, None].expand(slots, 4).contiguous())
    expected = sampling.choose(logits, *rules, rows)
    choose = Sampler(Launcher(), torch.device("cpu")).choose
    assert torch.equal(choose(logits, rules, rows, True), expected)
