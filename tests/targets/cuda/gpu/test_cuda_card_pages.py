"""On the card: memory is mapped behind the pages that texts hold, and no bit depends on it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from drafters.lookup.cuda import DeviceLookup
from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.pages import PagePlan
from specdec.core.types import Sampling, Sequence
from targets.arch import Arch, released
from targets.cuda.backend import CudaBackend
from targets.cuda.cards import step_of
from targets.cuda.graphs import Captured, CapturedParts, GraphPool
from targets.cuda.load import CudaOptions, random_target
from targets.cuda.load_cards import random_cards
from targets.cuda.mapped import GRANULE, MappedPages

pytestmark = pytest.mark.gpu
PAGE = 4096
"""Positions of 31B's global heads in FP8."""
K = 4
PLAN = PagePlan(PAGE, 5, 64, 5 * PAGE, 64, mapped=True)
"""Five pages: the longest text alone, or three of one page with two to grow."""


def test_memory_follows_the_texts():
    device = torch.device("cuda", torch.cuda.current_device())
    pages = MappedPages(PagePlan(GRANULE // 64, 3, 0, 3 * GRANULE // 64, 64, True), 3, device)
    before = torch.cuda.mem_get_info()[0]
    shapes = [(3, 2, 3 * GRANULE // 64, 64), (3, 2, 3 * GRANULE // 64 // 32, 64, 32)]
    k, v = (part.view(torch.uint8) for part in pages.tensors(shapes, torch.float8_e4m3fn))
    assert before - torch.cuda.mem_get_info()[0] >= 3 * 2 * 2 * GRANULE
    size = GRANULE // 64
    assert pages.reserve(0, 2 * size) and not k[0, :, : 2 * size].any()
    k[0, :, : 2 * size] = 7
    v[0, :, : 2 * size // 32] = 9
    assert pages.reserve(2, size) and not v[2, :, : size // 32].any()
    k[2, :, :size] = 5
    assert not pages.reserve(1, size)
    pages.release(0)
    assert pages.reserve(1, 2 * size), "another slot's text has gone"
    k[1, :, : 2 * size] = 3
    assert bool((k[2, :, :size] == 5).all()) and bool((k[1, :, : 2 * size] == 3).all())
    pages.release(1)
    pages.release(2)
    assert pages.reserve(0, 3 * size)
    k[0] = 1
    assert int(k[0].sum()) == k[0].numel()
    held = torch.cuda.mem_get_info()[0]
    del k, v, pages
    assert torch.cuda.mem_get_info()[0] - held == 3 * 2 * 2 * GRANULE


def arch() -> Arch:
    """31B's first six layers, of which the last is global."""
    whole = released("gemma-4-31b")
    return replace(whole, layers=whole.layers[:6])


@cache
def target_of(paged: bool, cards: int):
    if torch.cuda.device_count() < cards:
        pytest.skip(f"needs {cards} GPUs")
    sizes = {"slots": 3, "max_len": 5 * PAGE - 192, "k": K, "dtype": "fp8", "kv_dtype": "fp8"}
    options = CudaOptions(**sizes, pages=PLAN if paged else None)
    return random_target(arch(), options) if cards == 1 else random_cards(arch(), options, cards)


def sequences() -> list[Sequence]:
    """Texts that cross the end of a page while they are decoded, or while they are read."""
    random = np.random.default_rng(3)
    lengths = 4_000, 3_990, 4_010, 9_000, 200, 8_100
    shapes = [Sampling(logprobs=1), Sampling(temperature=1.0, top_p=0.9, seed=4, logprobs=0)]
    return [
        Sequence(
            np.resize(random.integers(0, 200_000, 700), length).tolist(),
            shapes[i % 2],
            max_tokens=200,
        )
        for i, length in enumerate(lengths)
    ]


def answers(engine: Engine, one_by_one: bool) -> list[tuple[list[int], list[float]]]:
    seqs = sequences()
    details: dict[int, list[float]] = {id(seq): [] for seq in seqs}
    for group in [[seq] for seq in seqs] if one_by_one else [seqs]:
        for event in engine.run(group):
            assert event.error is None
            details[id(event.sequence)] += [part.logprob for part in event.logprobs or ()]
    return [(seq.tokens[seq.prompt_len :], details[id(seq)]) for seq in seqs]


@cache
def plain(cards: int):
    target = target_of(False, cards)
    return answers(Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 0)), True)


@pytest.mark.parametrize("cards", [1, 2])
@pytest.mark.parametrize("loop", ["host", "device"])
def test_texts_that_give_way_keep_every_bit(loop, cards):
    """Whole slots on as many cards: several read long prompts by other kernels than one."""
    target = target_of(True, cards)
    cycle = host_cycle(target, NoDrafter(), 0)
    if loop == "device":
        lookup = step_of(target, lambda rank: DeviceLookup(rank, 2, 5))
        cycle = CudaBackend().device_loop(target, lookup, K)
    engine = Engine(target, NoDrafter(), cycle, pages=target.pages)
    assert answers(engine, False) == plain(cards)
    assert engine.gave_way > 0 and not any(target.pages.held)


def test_a_pool_of_graphs_outlives_them():
    pool = GraphPool(torch.device("cuda", torch.cuda.current_device()))
    kept = Captured(lambda: torch.zeros(1 << 20, device="cuda") + 1, pool).result
    parts = CapturedParts(lambda cut: (cut(), torch.zeros(8, device="cuda") + 2)[1], pool)
    parts.parts[0].replay()
    parts.parts[1].replay()
    assert float(parts.result.sum()) == 16 and kept is not None
