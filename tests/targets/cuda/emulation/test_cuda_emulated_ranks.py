"""One model on several cards, without a GPU: each rank's part of the layers on emulated kernels;
and the kernel that adds the sums of all ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Condition

import pytest
import torch

from targets.arch import Arch
from targets.cuda import norms
from targets.cuda.cache import make_cache
from targets.cuda.exchange import Inboxes, PartialSum
from targets.cuda.model import decode
from targets.cuda.norms import Norms
from targets.cuda.ops import NOTHING, Closing, Opening, Rows
from targets.cuda.params import random_params
from targets.cuda.ranks import Rank, RankKernels
from targets.model_folder import read_arch
from tests.support.tiny import write_tiny
from tests.targets.cuda.emulation import emulated
from tests.targets.cuda.emulation.emulated import Launcher, just_written
from tests.targets.cuda.emulation.emulated_weights import randn

pytestmark = pytest.mark.usefixtures("eager")
EMPTY = -1
"""int32 of an inbox's word where nothing has arrived."""
CUT = [(5,), (2, 3)]
"""Tokens per call, one way and another."""


class Turns:
    """Lets one rank run at a time: launches of emulated kernels belong to one test, in order."""

    def __init__(self, ranks: int) -> None:
        self._parts: dict[tuple[int, int], torch.Tensor] = {}
        self._ranks, self._changed, self._turn = ranks, Condition(), 0

    def wait(self, rank: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == rank, timeout=60)

    def pass_on(self) -> None:
        with self._changed:
            self._turn = (self._turn + 1) % self._ranks
            self._changed.notify_all()

    def summed(self, rank: int, own: PartialSum) -> torch.Tensor:
        """Of all ranks' parts, as the kernel adds them."""
        self._parts[own.turn, rank] = own.own.clone()
        self.pass_on()
        self.wait(rank)
        parts = torch.stack([self._parts[own.turn, other] for other in range(self._ranks)])
        while len(parts) > 1:
            parts = parts[::2] + parts[1::2]
        return parts[0] if own.scale is None else parts[0] * own.scale


class Emulated(RankKernels, emulated.Kernels):
    """A rank's kernels; `turns` stands for the exchange."""

    def __init__(self, rank: Rank, turns: Turns) -> None:
        places = tuple((0,) * rank.count for _ in range(2))
        inboxes = Inboxes(rank.number, places, 64)
        super().__init__(rank, inboxes, 64, torch.bfloat16, {"fp8", "bf16", "int8", "int4"})
        self._turns, own = turns, self.norm
        self.norm = lambda h, opening, closing=NOTHING, kept=None: own(
            h, opening, self._whole(closing), kept
        )

    def _whole(self, closing: Closing) -> Closing:
        if not isinstance(closing.branch, PartialSum):
            return closing
        return closing._replace(branch=self._turns.summed(self.rank.number, closing.branch))


def tiny(path, variant: str) -> Arch:
    """With widths that eight k groups divide; the global layer has one K/V head."""
    write_tiny(path, variant)
    arch = read_arch(path)
    layers = (
        replace(layer, heads=256 // layer.head_dim, kv_heads=4 if layer.window else 1, ffw=256)
        for layer in arch.layers
    )
    return replace(arch, layers=tuple(layers))


def logits(arch: Arch, ops, weights, cuts: tuple[int, ...]) -> torch.Tensor:
    cache = make_cache(arch, 2, 32, 16, torch.bfloat16, "cpu")
    ids = torch.arange(10, dtype=torch.int32).view(2, 5) * 7 % 300
    start, parts = 0, []
    for size in cuts:
        at = torch.tensor([start, start], dtype=torch.int32)
        rows = Rows(ids[:, start : start + size].contiguous(), at, torch.tensor([1, 0]).int())
        out = decode(weights, arch, cache, rows, ops).logits
        assert out is not None
        parts.append(out.view(2, size, -1))
        start += size
    return torch.cat(parts, 1)


def on_ranks(arch: Arch, count: int, dtype: str, cuts: tuple[int, ...]) -> list[torch.Tensor]:
    """Each rank's logits."""
    turns = Turns(count)

    def run(number: int) -> torch.Tensor:
        turns.wait(number)
        rank = Rank(number, count, arch)
        ops = Emulated(rank, turns)
        weights = random_params(arch, dtype, "cpu", ops, cut=rank.cut)
        out = logits(rank.own, ops, weights, cuts)
        turns.pass_on()
        return out

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def bits_are_equal(arch: Arch, counts: tuple[int, ...], dtype: str, cuts) -> None:
    ops = emulated.Kernels(arch, 64, torch.bfloat16, {"fp8", "bf16", "int8", "int4"})
    weights = random_params(arch, dtype, "cpu", ops)
    for cut in cuts:
        whole = logits(arch, ops, weights, cut)
        for count in counts:
            for own in on_ranks(arch, count, dtype, cut):
                assert torch.equal(own, whole)


def test_two_four_and_eight_ranks_have_one_cards_bits(tmp_path):
    """Of a sliding layer and a global one."""
    arch = tiny(tmp_path, "31b")
    last = next(i for i, layer in enumerate(arch.layers) if layer.window is None)
    arch = replace(arch, layers=arch.layers[last - 1 : last + 1])
    bits_are_equal(arch, (2, 4, 8), "fp8", [(5,)])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp8", "int4", "bfloat16"])
@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("variant", ["31b", "12b"])
def test_ranks_have_one_cards_bits(tmp_path, variant, count, dtype):
    bits_are_equal(tiny(tmp_path, variant), (count,), dtype, CUT)


@pytest.mark.parametrize("rows_at_once", [128, 2])
@pytest.mark.parametrize(("ranks", "scaled"), [(2, True), (4, False)])
def test_a_rank_sends_its_sums_and_adds_all(monkeypatch, rows_at_once, ranks, scaled):
    """The others' have arrived; its own arrive there, and its inbox is empty again."""
    monkeypatch.setattr(norms, "ROWS_AT_ONCE", rows_at_once)
    m, width, held, rank = 5, 48, 9, 1
    parts, scale = randn(ranks, m, width, seed=1), randn(width, seed=2) if scaled else None
    inboxes = torch.full((ranks, ranks, held, width), EMPTY, dtype=torch.int32)
    for other in range(ranks):
        if other != rank:
            inboxes[rank, other, :m] = parts[other].view(torch.int32)
    addresses = tuple(inbox.data_ptr() for inbox in inboxes)
    view = Inboxes(rank, (addresses, addresses), held)
    h, post, pre = randn(m, width, seed=3), randn(width, seed=4), randn(width, seed=5)
    total = parts
    while len(total) > 1:
        total = total[::2] + total[1::2]
    total = total[0] if scale is None else total[0] * scale
    made = []
    for branch in (total, PartialSum(parts[rank].clone(), scale, view, 0)):
        stream = h.clone()
        just_written(stream)
        x = Norms(Launcher(), 1e-6).norm(stream, Opening(pre, "fp8"), Closing(branch, post))
        made.append((stream, x.data))
    for ours, theirs in zip(made[1], made[0], strict=True):
        assert torch.equal(ours, theirs)
    assert (inboxes[rank] == EMPTY).all()
    for other in range(ranks):
        if other != rank:
            assert torch.equal(inboxes[other, rank, :m].view(torch.float32), parts[rank])
            assert (inboxes[other, rank, m:] == EMPTY).all()
