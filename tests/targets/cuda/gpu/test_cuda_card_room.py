"""On the card: if memory is short, only the request that needs it fails, with a one-line error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.types import Sequence
from targets import mini
from targets.cuda.graphs import Captured, GraphPool
from targets.cuda.load import CudaOptions, load_target
from targets.cuda.out_of_memory import catching_oom

pytestmark = pytest.mark.gpu
LARGE = 8 << 30


@contextmanager
def no_more_than(extra: int) -> Iterator[None]:
    """This process gets `extra` bytes beyond what it holds: others on the GPU notice nothing."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + extra) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_capture_that_runs_out_leaves_others_usable():
    x = torch.ones(1000, device="cuda")
    pool = GraphPool(x.device)
    double = Captured(lambda: x * 2, pool)
    turns = 0

    def grows() -> torch.Tensor:
        """Little at first; too much once it is captured."""
        nonlocal turns
        turns += 1
        return torch.empty(LARGE if turns > 1 else 10, device="cuda") + x[0]

    for _ in range(3):
        turns = 0
        with (
            no_more_than(LARGE),
            pytest.raises(MemoryError, match="no room for a test"),
            catching_oom("a test"),
        ):
            Captured(grows, pool)
        assert turns == 2
        x.fill_(3)
        assert (double.replay() == 6).all()
        assert (Captured(lambda: x * 3, pool).replay() == 9).all()
        y = torch.empty(1 << 20, device="cuda").fill_(1)  # plain allocations too
        assert int(y.sum()) == 1 << 20


def texts(count: int) -> list[Sequence]:
    return [Sequence([5 + i, 6, 7], max_tokens=30) for i in range(count)]


@pytest.mark.parametrize("loop", ["host", "device"])
def test_who_joins_without_room_fails_alone(loop):
    from drafters.none.cuda import DeviceNone
    from targets.cuda.device_loop import device_loop

    target = load_target(mini.path("mini"), CudaOptions(slots=16, max_len=256, dtype="fp8", k=31))
    cycle = host_cycle(target, NoDrafter(), 31)
    if loop == "device":
        cycle = device_loop(target, DeviceNone(), 31)
    engine = Engine(target, NoDrafter(), cycle)
    alone, crowd = texts(16), texts(16)
    for seq in alone:
        engine.run_to_end([seq])
    with no_more_than(0):
        events = list(engine.run(crowd))
    errors = [event.error for event in events if event.error]
    assert errors and all("no room for a" in error for error in errors), errors
    assert {seq.finish for seq in crowd} == {"length", "error"} and crowd[0].finish == "length"
    for seq, same in zip(crowd, alone, strict=True):
        assert seq.finish == "error" or seq.tokens == same.tokens
    again = texts(16)  # with enough memory all are served
    engine.run_to_end(again)
    assert [seq.tokens for seq in again] == [seq.tokens for seq in alone]
