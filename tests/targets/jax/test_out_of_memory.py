"""A device without memory for a kept prompt: it is not kept, or read again, and texts go on."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from drafters.dflash.jax.drafter import BlockDraftHead, PlacedBlock
from drafters.dflash.jax.snapshots import BlockSnapshots
from drafters.eagle3.jax.drafter import EagleDraftHead
from drafters.eagle3.jax.snapshots import EagleSnapshots
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.prefix_cache.cache import PrefixCache
from specdec.core.prefix_cache.pool import Budget, SnapshotPool
from specdec.core.types import Sequence
from targets.jax.host_drafter import HostHead
from targets.jax.snapshots import HostArray, SlotSnapshots
from tests.support.block_heads import SPECS, random_block
from tests.support.eagle3_heads import jax_target_of, random_head

pytestmark = pytest.mark.usefixtures("cheap_programs")

K = 3
PROMPT = [7 + i % 40 for i in range(72)]
"""Two chunks that are kept, and a rest."""
EXHAUSTED = "RESOURCE_EXHAUSTED: Out of memory allocating 1024 bytes."


def failing(message):
    def program(*given):
        raise jax.errors.JaxRuntimeError(message)

    return program


@pytest.fixture(params=["eagle3", "dflash"])
def head(request, tiny):
    target = jax_target_of(tiny["31b"])
    if request.param == "eagle3":
        return EagleDraftHead(random_head(), target, K)
    return BlockDraftHead(PlacedBlock(random_block(SPECS["dflash"]), target))


@pytest.fixture
def engine(head: Any) -> Engine:
    unit = SlotSnapshots(head.target).unit
    kind: Any = EagleSnapshots if isinstance(head, EagleDraftHead) else BlockSnapshots
    owners = [SlotSnapshots(head.target), kind(head, unit)]
    cache = PrefixCache(unit, owners, SnapshotPool(Budget(1 << 30, 1 << 30)))
    drafter = HostHead(head)
    return Engine(head.target, drafter, host_cycle(head.target, drafter, K), 8, cache)


def answered(engine) -> Sequence:
    seq = Sequence(list(PROMPT), max_tokens=6)
    for event in engine.run([seq]):
        assert event.error is None or "no room" in event.error
    return seq


@pytest.mark.parametrize("owner", [0, 1], ids=["target", "head"])
def test_a_prompt_that_can_not_be_copied_is_not_kept(engine, monkeypatch, owner):
    snapshots, cache = engine.prefix_cache.owners[owner], engine.prefix_cache
    name = "_cut" if isinstance(snapshots, EagleSnapshots) else "_cut_chunk"
    monkeypatch.setattr(snapshots, "_take_chunk" if owner == 0 else name, failing(EXHAUSTED))
    assert answered(engine).finish == "length" and not len(cache.pool)


@pytest.mark.parametrize("readable", [0, 2, 4, 8, 10])
def test_a_kept_prompt_that_there_is_no_room_to_put_back_is_read_anew(
    engine, monkeypatch, readable
):
    """At any of its parts, the target's first and then the head's: the next one finds all whole."""
    engine.prefix_cache.pool.budget.device = 0
    first, honest, left = answered(engine), HostArray.on_device, [readable]

    def on_device(array):
        left[0] -= 1
        return failing(EXHAUSTED)() if left[0] < 0 else honest(array)

    with monkeypatch.context() as short:
        short.setattr(HostArray, "on_device", on_device)
        again = answered(engine)
    assert first.finish == "length" and again.cached == 0
    for other in (again, answered(engine)):
        assert other.tokens == first.tokens and other.acceptance == first.acceptance


@pytest.mark.parametrize(("message", "processes"), [("INTERNAL: out of order", 1), (EXHAUSTED, 2)])
def test_any_other_error_ends_the_engine(engine, monkeypatch, message, processes):
    """Of several processes one must not go another way than the others."""
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.setattr(engine.prefix_cache.owners[0], "_take_chunk", failing(message))
    with pytest.raises(jax.errors.JaxRuntimeError):
        answered(engine)
