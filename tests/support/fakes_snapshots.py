"""Snapshots of a target that can be calculated by hand, and an engine with a cache of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.prefix_cache.cache import PrefixCache
from specdec.core.prefix_cache.pool import Budget, SnapshotPool
from tests.support.fakes import FakeTarget

UNIT = 8
"""Tokens of a chunk."""
RING = 100
"""Bytes of a boundary."""
CHUNK = 10
"""Bytes of a chunk."""


@dataclass
class FakeSnapshot:
    values: object
    device_bytes: int
    on_host: bool = False

    @property
    def host_bytes(self) -> int:
        return self.device_bytes

    def to_host(self) -> FakeSnapshot:
        assert not self.on_host
        return FakeSnapshot(self.values, self.device_bytes, True)


class FakeSnapshots:
    """Snapshots of a FakeTarget. It has no rings; a boundary's snapshot is just its position."""

    def __init__(self, target: FakeTarget) -> None:
        self.target, self.from_host = target, 0

    def take_chunk(self, seq, start, stop):
        return FakeSnapshot(self.target.fed[seq.slot, start:stop].copy(), CHUNK)

    def take_boundary(self, seq, stop):
        return FakeSnapshot(stop, RING)

    def restore(self, seq, stop, chunks, boundary):
        assert boundary.values == stop
        self.from_host += boundary.on_host
        self.target.fed[seq.slot] = -9
        self.target.fed[seq.slot, :stop] = np.concatenate([chunk.values for chunk in chunks])


def cached_engine(slots=2, device=10**6, host=10**6, target=None) -> Engine:
    target = target or FakeTarget(slots=slots, chunk=4)
    cache = PrefixCache(UNIT, [FakeSnapshots(target)], SnapshotPool(Budget(device, host)))
    drafter = NoDrafter()
    return Engine(target, drafter, host_cycle(target, drafter, 0), prefix_cache=cache)
