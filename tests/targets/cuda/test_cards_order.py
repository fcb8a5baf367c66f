"""The order of calls on several cards: nothing that waits lies between the launches of one step.
Each rank is a whole model on the CPU."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from drafters.cards import DividedHeads
from specdec.core.types import Sampling, Sequence
from targets import mini
from targets.cuda import cards, device_loop, meter
from targets.cuda.cards import CardsCycle, CardsTarget, OnCards
from targets.cuda.device_loop import CapturedCycle, GraphKey
from targets.cuda.host_blocks import BLOCK, SLAB, host_blocks
from targets.cuda.host_drafter import HostHead
from targets.cuda.load import CudaOptions, load_target
from targets.cuda.sampler import HostRecords
from targets.cuda.snapshots import TensorSnapshot
from targets.cuda.target import CudaTarget

SIZES = {"slots": 2, "device": "cpu", "max_len": 128, "chunk": 64, "short": 16}


@pytest.fixture(autouse=True)
def no_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


def cards_of(**options) -> CardsTarget:
    ranks = [load_target(mini.path("mini"), CudaOptions(**SIZES | options)) for _ in range(2)]
    return CardsTarget(ranks[0].arch, ranks)


def logged(monkeypatch, log, where, name, rank=lambda *given: ""):
    """Log each call of where.name, before it."""
    honest = getattr(where, name)

    def call(*given, **named):
        log.append((name, rank(*given)))
        return honest(*given, **named)

    monkeypatch.setattr(where, name, call)


def long_prompt(slot=0, **given) -> Sequence:
    return Sequence([2, *range(5, 44)], slot=slot, **given)


@pytest.fixture
def events(monkeypatch):
    """Names of what was called, in order."""
    log = []
    for name in ("seat", "_call", "short"):
        logged(monkeypatch, log, CudaTarget, name)
    return log


def names(log):
    return [name for name, _ in log]


def seated_first(log):
    found = names(log)
    last = max(i for i, name in enumerate(found) if name == "seat")
    return last < min(i for i, name in enumerate(found) if name != "seat")


def test_all_cards_are_seated_before_a_prompt_is_launched_on_any(events):
    """A request may have biases by the hundred thousand."""
    list(cards_of().prefill_parts(long_prompt(), 0, 40))
    assert names(events).count("seat") == 2 and seated_first(events)


def test_all_cards_are_seated_before_prompts_that_are_read_together(events):
    target = cards_of()
    target.prefill_all([Sequence([2, 5, 6], slot=0), Sequence([2, 7], slot=1)])
    assert names(events).count("seat") == 4 and seated_first(events)


def test_a_slots_biases_are_one_copy(monkeypatch):
    target, log = load_target(mini.path("mini"), CudaOptions(**SIZES)), []
    rng = np.random.default_rng(1)
    ids = rng.integers(0, target.vocab, 10_000)  # some of them more than once
    biases = rng.uniform(-100, 100, len(ids))
    expected = target.bias[1].clone()
    for token, bias in zip(ids.tolist(), biases.tolist(), strict=True):
        expected[token] += bias
    seq = Sequence([2], Sampling(logit_bias=tuple(zip(ids.tolist(), biases.tolist(), strict=True))))
    seq.slot = 1
    logged(monkeypatch, log, torch.Tensor, "__setitem__")
    target.seat(seq)
    assert len(log) < 15
    assert torch.equal(target.bias[1].view(torch.int32), expected.view(torch.int32))
    target.seat(Sequence([2], slot=1))
    assert torch.equal(target.bias[1], target.bias[0])


class StubCycle:
    """Of one card, in place of a captured one."""

    def __init__(self, launch=lambda: None, wait=lambda: None) -> None:
        self._launch, self._wait = launch, wait

    def prepare(self, seqs):
        return None

    def launch(self, prepared):
        self._launch()

    def end(self, prepared, forced_prefix):
        return SimpleNamespace(done=SimpleNamespace(synchronize=self._wait))


def cycle_of(monkeypatch, *stubs) -> CardsCycle:
    waiting = list(stubs)
    monkeypatch.setattr(cards, "device_loop", lambda *given: waiting.pop(0))
    ranks = [SimpleNamespace(device=torch.device("cpu"))] * len(stubs)
    target: Any = SimpleNamespace(ranks=ranks)
    none: Any = [None] * len(stubs)
    return CardsCycle(target, OnCards(none), 4)


def test_the_device_loop_says_what_to_look_for_where_a_card_waited_in_vain(monkeypatch):
    def trapped():
        raise RuntimeError("CUDA error: unspecified launch failure")

    cycle = cycle_of(monkeypatch, StubCycle(wait=trapped), StubCycle())
    with pytest.raises(RuntimeError, match="^a GPU waited 2 seconds in vain"):
        cycle([], False)


def unpinned(monkeypatch):
    """torch.empty makes ordinary memory, on any device and also where it is to be pinned."""
    empty = torch.empty

    def plain(*given, device=None, pin_memory=False, **named):
        return empty(*given, **named)

    monkeypatch.setattr(torch, "empty", plain)


def test_host_memory_of_one_cards_copies_is_never_anothers(monkeypatch):
    """Each card copies in a stream of its own: what one gives back may still be written by it."""
    unpinned(monkeypatch)
    most = torch.zeros(SLAB - BLOCK, dtype=torch.uint8)
    first, second = TensorSnapshot.of([most]), TensorSnapshot.of([most])
    first._device, second._device = torch.device("cuda", 0), torch.device("cuda", 1)
    given_back = {block.data_ptr() for block in second.to_host()._blocks}
    taken = first.to_host()._blocks
    host_blocks.cache_clear()
    assert not given_back & {block.data_ptr() for block in taken}


def test_features_of_a_prompt_take_no_memory_between_launches(monkeypatch):
    target, log = cards_of(features=(0, 2)), []
    seq = Sequence([2, *range(5, 60)], slot=0)
    target.prefill(seq, 0, 16)
    honest, running = CudaTarget._call, []

    def call(rank, rows):
        log.append("call")
        running.append(rank)
        out = honest(rank, rows)
        running.pop()
        return out

    monkeypatch.setattr(CudaTarget, "_call", call)
    for where, name in ((torch, "cat"), (torch, "empty"), (torch.Tensor, "clone")):
        own = getattr(where, name)

        def noted(*given, own=own, name=name, **named):
            log.extend([] if running else [name])
            return own(*given, **named)

        monkeypatch.setattr(where, name, noted)
    step = target.prefill(seq, 16, 56)
    first = log.index("call")
    assert log[first : first + 6] == ["call"] * 6
    alone = cards_of(features=(0, 2)).ranks[0]
    alone.prefill(seq, 0, 16)
    expected = alone.prefill(seq, 16, 56).features
    assert step.features is not None and expected is not None
    assert [own.dtype for own in step.features] == [torch.float32] * 2
    assert all(torch.equal(own, expected) for own in step.features)


def without_room(*given):
    raise torch.cuda.OutOfMemoryError("CUDA out of memory")


NO_ROOM = "^a GPU ran out of memory while another one waited"


@pytest.fixture
def given_back(monkeypatch):
    """Calls by which torch gives memory back: they wait for every card."""
    log = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("given back"))
    return log


def test_a_prompt_that_one_card_has_begun_fails_for_good(monkeypatch, given_back):
    target = cards_of()
    monkeypatch.setattr(target.ranks[1], "_call", without_room)
    with pytest.raises(RuntimeError, match=NO_ROOM):
        list(target.prefill_parts(long_prompt(), 0, 40))
    assert not given_back


def test_prompts_that_one_card_has_begun_fail_for_good(monkeypatch, given_back):
    target = cards_of()
    monkeypatch.setattr(target.ranks[1], "short", without_room)
    with pytest.raises(RuntimeError, match=NO_ROOM):
        target.prefill_all([Sequence([2, 5, 6], slot=0), Sequence([2, 7], slot=1)])
    assert not given_back


def test_a_verify_that_one_card_has_begun_fails_for_good(monkeypatch, given_back):
    target = cards_of()
    seq = long_prompt()
    target.prefill(seq, 0, 40)
    seq.tokens.append(7)
    nothing = np.empty((1, 0), np.int32)
    target.verify([seq], nothing)
    monkeypatch.setattr(target.ranks[1], "step", without_room)
    with pytest.raises(RuntimeError, match=NO_ROOM):
        target.verify([seq], nothing)
    assert not given_back


def test_what_fails_before_any_card_has_begun_is_one_requests(monkeypatch, given_back):
    target = cards_of()
    monkeypatch.setattr(target.ranks[1], "prepare_prefill", without_room)
    with pytest.raises(MemoryError, match="a chunk of 40 tokens"):
        list(target.prefill_parts(long_prompt(), 0, 40))
    assert given_back


def test_a_draft_that_one_card_has_begun_fails_for_good(monkeypatch, given_back):
    target = cards_of()
    heads: list[Any] = [
        SimpleNamespace(target=rank, propose=lambda *given: None) for rank in target.ranks
    ]
    each = [HostHead(head) for head in heads]
    divided = DividedHeads(target.ranks, each)
    divided.propose([long_prompt()], 3)
    heads[1].propose = without_room
    with pytest.raises(RuntimeError, match=NO_ROOM):
        divided.propose([long_prompt()], 3)
    assert not given_back
    with pytest.raises(MemoryError, match="the draft head"):
        divided.propose([long_prompt()], 2)


class Litter:
    """What an older engine leaves behind: it waits for its card where it is freed."""

    def __init__(self, log) -> None:
        self.own = self
        weakref.finalize(self, log.append, "freed").atexit = False


def test_nothing_is_freed_between_launches(monkeypatch):
    log = []

    def launch():
        log.append("launch")
        Litter(log)
        assert len([[] for _ in range(1000)]) == 1000

    cycle = cycle_of(monkeypatch, StubCycle(launch), StubCycle(launch))
    monkeypatch.setattr(cards, "rounds", lambda *given: [])
    usual = gc.get_threshold()
    gc.set_threshold(1)
    try:
        cycle([], False)
    finally:
        gc.set_threshold(*usual)
    gc.collect()
    assert log == ["launch", "launch", "freed", "freed"]
    assert gc.isenabled()


def test_records_wait_for_their_own_card(monkeypatch):
    waited = []
    unpinned(monkeypatch)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *given, device, **named: zeros(*given, **named))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    HostRecords(2, 3, torch.device("cuda", 1))
    assert waited == [torch.device("cuda", 1)]


@pytest.mark.parametrize("guided", [False, True])
def test_page_locked_memory_is_taken_before_any_launch(monkeypatch, guided):
    log, key = [], GraphKey(2, 4, False, False, guided=guided)
    monkeypatch.setattr(device_loop, "page_locked", lambda rows: log.append("locked") or rows)
    seq: Any = SimpleNamespace(slot=1, seatings=0)

    class Placed(list):
        def copy_(self, rows, non_blocking):
            self[:] = rows.tolist()

    cycle: Any = object.__new__(CapturedCycle)
    slots = Placed()
    replay = SimpleNamespace(replay=lambda: log.append("launch"), record=lambda: None)
    cycle.fed, cycle.pending, cycle.owners = {}, None, {1: (seq, 0)}
    parts = SimpleNamespace(slots=slots, drafted=replay, guides=SimpleNamespace(put_first=str))
    parts.graphs = SimpleNamespace(parts=(replay, replay, replay))
    cycle.in_parts, cycle.graphs = {key: parts}, {key: (slots, None, replay)}
    cycle.drafter = SimpleNamespace(ready=lambda seqs: None)
    monkeypatch.setattr(CapturedCycle, "_key", lambda *given: key)
    monkeypatch.setattr(device_loop, "constrained", lambda seqs: guided)
    monkeypatch.setattr(device_loop, "takes_known", lambda *given: False)
    monkeypatch.setattr(device_loop, "forced_prefix_of", lambda *given: None)
    prepared = cycle.prepare([seq])
    assert log == ["locked"] and slots == [1, -1]
    cycle.launch(prepared)
    cycle.launch(cycle.prepare([seq]))
    assert log.count("locked") == 1


def test_memory_is_shown_of_the_fullest_card(monkeypatch):
    target = cards_of()
    for number, rank in enumerate(target.ranks):
        rank.device = torch.device("cuda", number)
    monkeypatch.setattr(meter, "used_bytes", lambda device: (5, 7)[device.index])
    held = meter.Meter(target).memory()
    assert held is not None
    assert (held["used"], held["cards"]) == (7, 2)
