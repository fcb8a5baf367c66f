"""Stores snapshots in device memory first, then in host memory, each within a budget; the least
recently used are evicted first."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from specdec.core.prefix_cache.snapshots import Snapshot

log = logging.getLogger("specdec.prefix_cache")
Parts = tuple[Snapshot | None, ...]
"""One entry's snapshots, one of each owner."""
REGAINED = 20_000
"""After so many further entries the pool may take all of its device budget again. Counted, so that
several processes agree."""


@dataclass
class Budget:
    """Most bytes that snapshots may take of each memory."""

    device: int = 0
    host: int = 0


@dataclass
class _Entry:
    parts: Parts
    lasting: bool = False
    """Whether it is never superseded by a newer entry."""
    superseded: bool = False


@dataclass
class _Tier:
    """One memory. Entries in the order of their use, the oldest first."""

    entries: OrderedDict[Hashable, _Entry] = field(default_factory=OrderedDict)
    used: int = 0


class SnapshotPool:
    """Entries by key. Any of them may be evicted: the prompt is then prefilled."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._device, self._host = _Tier(), _Tier()
        self._given_up = 0
        """Bytes of the device budget that are not used for now, as others need them."""

    def __contains__(self, key: Hashable) -> bool:
        return key in self._device.entries or key in self._host.entries

    def __getitem__(self, key: Hashable) -> Parts:
        tier = self._device if key in self._device.entries else self._host
        return tier.entries[key].parts

    def __len__(self) -> int:
        return len(self._device.entries) + len(self._host.entries)

    @property
    def device_bytes(self) -> int:
        return self._device.used

    @property
    def host_bytes(self) -> int:
        return self._host.used

    def put(self, key: Hashable, parts: Parts, lasting: bool = False) -> None:
        """Keep an entry with device memory as the most recently used; evicts others if need be."""
        self._device.entries[key] = _Entry(parts, lasting)
        self._device.used += _on_device(parts)
        self._given_up = max(0, self._given_up - -(-self.budget.device // REGAINED))
        self._settle()

    def touch(self, keys: Iterable[Hashable]) -> None:
        """Mark entries as used, in this order."""
        for key in keys:
            for tier in (self._device, self._host):
                if key in tier.entries:
                    tier.entries.move_to_end(key)
                    tier.entries[key].superseded = False

    def supersede(self, key: Hashable) -> None:
        """Mark an entry as superseded, unless it is lasting: it is evicted first, and not moved to
        host memory."""
        for tier in (self._device, self._host):
            if key in tier.entries and not tier.entries[key].lasting:
                tier.entries.move_to_end(key, last=False)
                tier.entries[key].superseded = True

    def give_way(self) -> bool:
        """Give up half of the device memory that is used; it is taken again little by little.
        False: nothing is used."""
        used = self._device.used
        if not used:
            return False
        self._given_up = self.budget.device - used // 2
        self._settle()
        left = self._device.used
        log.warning("the device is short of memory: kept prompts get %d of %d bytes", left, used)
        return True

    def clear(self) -> None:
        self._device, self._host = _Tier(), _Tier()
        self._given_up = 0

    def _settle(self) -> None:
        leaving: list[tuple[Hashable, _Entry]] = []
        most = self.budget.device - self._given_up
        while self._device.entries and self._device.used > most:
            key, entry = self._device.entries.popitem(last=False)
            self._device.used -= _on_device(entry.parts)
            if not entry.superseded and _on_host(entry.parts) <= self.budget.host:
                leaving.append((key, entry))
        for key, entry in self._fitting(leaving):
            self._to_host(key, entry)

    def _fitting(self, leaving: list[tuple[Hashable, _Entry]]) -> list[tuple[Hashable, _Entry]]:
        """The newest of these, as many as host memory holds: older ones would be copied there to be
        evicted by them."""
        first, needed = len(leaving), 0
        while first and needed + _on_host(leaving[first - 1][1].parts) <= self.budget.host:
            first -= 1
            needed += _on_host(leaving[first][1].parts)
        return leaving[first:]

    def _to_host(self, key: Hashable, entry: _Entry) -> None:
        needed, host = _on_host(entry.parts), self._host
        if needed > self.budget.host:  # lowered since by an entry for which there was no memory
            return
        while host.used + needed > self.budget.host:
            host.used -= _on_host(host.entries.popitem(last=False)[1].parts)
        try:
            entry.parts = tuple(part and part.to_host() for part in entry.parts)
        except MemoryError as refusal:  # keeping is optional: from now on what there is must do
            host_budget, self.budget.host = self.budget.host, host.used
            log.warning("kept prompts get %d of %d bytes: %s", host.used, host_budget, refusal)
            return
        host.entries[key] = entry
        host.used += needed


def _on_device(parts: Parts) -> int:
    return sum(part.device_bytes for part in parts if part is not None)


def _on_host(parts: Parts) -> int:
    return sum(part.host_bytes for part in parts if part is not None)
