"""From a checkpoint folder, or from an architecture, to one model on several cards (ranks.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from targets.arch import Arch
from targets.checkpoint import Checkpoint
from targets.cuda.cards import CardsTarget
from targets.cuda.exchange import ExchangeMemory
from targets.cuda.graphs import TOGETHER, bucket_of
from targets.cuda.load import CudaOptions, all_or_nothing, make_ops, make_plan, plan_of
from targets.cuda.ops import Ops
from targets.cuda.params import Weights, load_params, random_params
from targets.cuda.plan import Plan
from targets.cuda.ranks import Rank, RankKernels, refuse_ranks
from targets.cuda.target import CudaTarget
from targets.model_folder import read_arch

SHORT = 512
"""Tokens that a call prefills behind others (`Plan.short`): the library, which is quicker for more
of them on one card, multiplies whole branches."""


def random_cards(arch: Arch, options: CudaOptions, count: int, seed: int = 0) -> CardsTarget:
    """`random_target` on so many cards: the same weights."""
    plan = make_plan(arch, options, "bfloat16")

    def weights(rank: Rank, device: str, ops: Ops) -> Weights:
        return random_params(arch, plan.dtype, device, ops, seed, cut=rank.cut)

    return _on_cards(arch, options, plan, count, (), weights)


def load_cards(
    path: Path, options: CudaOptions, count: int, suppress: tuple[int, ...] = ()
) -> CardsTarget:
    """`load_target` on so many cards."""
    arch = read_arch(path)
    checkpoint = Checkpoint(path, arch)
    plan = plan_of(checkpoint, arch, options)

    def weights(rank: Rank, device: str, ops: Ops) -> Weights:
        return load_params(checkpoint, arch, plan.dtype, device, ops, rank.cut)

    return _on_cards(arch, options, plan, count, suppress, weights)


def most_rows(options: CudaOptions) -> int:
    """Rows of the largest call, whose sums the cards exchange."""
    return max(TOGETHER, bucket_of(options.slots) * (options.k + 1))


def _on_cards(
    arch: Arch,
    options: CudaOptions,
    plan: Plan,
    count: int,
    suppress: tuple[int, ...],
    weights: Callable[[Rank, str, Ops], Weights],
) -> CardsTarget:
    """weights: makes a rank's part on its device."""
    refuse_ranks(arch, count)
    memory, ranks = ExchangeMemory(range(count), most_rows(options), arch.hidden), []
    for number in range(count):
        rank, device = Rank(number, count, arch), f"cuda:{number}"
        own = replace(plan, device=device, short=SHORT)
        with torch.cuda.device(number), all_or_nothing():
            ops = make_ops(rank.own, own, partial(RankKernels, rank, memory.of(number)))
            params = weights(rank, device, ops)
            ranks.append(CudaTarget(own, rank.own, params, ops, suppress, options.graphs))
    return CardsTarget(arch, ranks)
