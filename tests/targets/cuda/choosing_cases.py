"""Rows to choose a token for by every way of sampling, for kernels on a card and emulated ones."""

from __future__ import annotations

from typing import NamedTuple

import torch

from specdec.core.types import Sampling
from targets.cuda import sampling
from targets.cuda.ops import Rows
from targets.sampling_params import Rules, set_row

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
KINDS = ("peaked", "even", "tied", "few")
"""Of logits."""


class Case(NamedTuple):
    """Logits, rules and rows, with the requests' slots in any order; the methods give the
    reference's choices."""

    logits: torch.Tensor
    rules: Rules
    rows: Rows

    def chosen(self) -> torch.Tensor:
        bias, table, history = self.rules
        return sampling.choose(self.logits, bias, table, history, self.rows)

    def greedy(self) -> torch.Tensor:
        return sampling.choose_greedy(self.logits, self.rules.bias, self.rows)


def case_of(vocab: int, tokens: int, kind: str, device: str) -> Case:
    draw, slots = torch.Generator(device).manual_seed(0), len(REQUESTS)
    table = sampling.blank_table(slots, device)
    for slot, request in enumerate(REQUESTS):
        set_row(table, slot, request, 9)
    logits = torch.randn((slots, tokens, vocab), generator=draw, device=device)
    if kind == "tied":
        logits = (logits * 4).round() / 2
    elif kind == "few":
        logits = torch.where(logits > 2, logits, -torch.inf)
    else:
        logits *= {"peaked": 5, "even": 0.01}[kind]
    bias = torch.zeros(slots, vocab, device=device)
    bias[:, 7], bias[:, 11] = 1.0, -torch.inf

    def whole(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=draw, device=device).int()

    rules = Rules(bias, table, whole(vocab, slots, 40))
    slot = torch.randperm(slots, generator=draw, device=device).int()
    return Case(logits, rules, Rows(whole(9, slots, tokens), whole(30, slots), slot))
