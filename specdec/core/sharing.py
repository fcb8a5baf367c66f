"""Shares an engine over callers: limits the queue, and chooses the sequence that gets the next
slot.

Decisions depend only on the order in which sequences were submitted, seated and released, so
several processes with the same order decide the same.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from specdec.core.types import Owner, Sequence


class QueueFull(Exception):
    """The waiting queue is at its bound: the caller should retry later (HTTP 429)."""


@dataclass
class Room:
    """Counts seated and waiting sequences by caller, and limits them."""

    slots: int
    max_waiting: int
    held: Counter[str] = field(default_factory=Counter)

    @property
    def capacity(self) -> int:
        return self.slots + self.max_waiting

    def take(self, caller: str, count: int = 1) -> None:
        """Add sequences of `caller`. Raises QueueFull if all places are taken and the caller would
        hold more than its part of the queue: `max_waiting` divided by the number of callers with
        sequences, itself included."""
        callers = len(self.held.keys() | {caller})
        part = -(-self.max_waiting // callers)
        if self.held.total() + count > self.capacity and self.held[caller] + count > part:
            waiting = max(0, self.held.total() - self.slots)
            raise QueueFull(f"{waiting} requests are waiting already")
        self.held[caller] += count

    def leave(self, caller: str) -> None:
        """One of its sequences has ended."""
        _less(self.held, caller)


@dataclass
class _Request:
    """The waiting sequences of a request."""

    turn: int
    """The turn in which the request came, or in which one of its sequences was seated last."""
    sequences: deque[Sequence] = field(default_factory=deque)


class Waiting:
    """The waiting sequences. The next one is of the caller with the fewest slots, and of its
    request with the fewest; among equals, of the one with the longest time since its last turn."""

    def __init__(self) -> None:
        self._callers: dict[str, dict[Owner, _Request]] = {}
        self._served: dict[str, int] = {}
        """Each caller's last turn; callers are API keys, so they are few."""
        self._turn = 0
        self._seated: Counter[Owner] = Counter()
        self._slots: Counter[str] = Counter()
        self._returned: deque[Sequence] = deque()
        """Those that gave way, the one that had joined first in front."""

    def __len__(self) -> int:
        return len(self._returned) + sum(
            len(request.sequences)
            for requests in self._callers.values()
            for request in requests.values()
        )

    def __bool__(self) -> bool:
        return bool(self._returned or self._callers)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._returned
        for requests in self._callers.values():
            for request in requests.values():
                yield from request.sequences

    def append(self, seq: Sequence) -> None:
        requests = self._callers.setdefault(seq.owner.caller, {})
        if seq.owner not in requests:
            requests[seq.owner] = _Request(self._next_turn())
        requests[seq.owner].sequences.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that has no slot."""
        if seq in self._returned:
            self._returned.remove(seq)
            return
        requests = self._callers[seq.owner.caller]
        requests[seq.owner].sequences.remove(seq)
        self._forget_empty(seq.owner)

    def put_back(self, seq: Sequence) -> None:
        """A sequence that gave way to others: it comes before all that never had a slot."""
        self._returned.appendleft(seq)

    def first(self, fits: Callable[[Sequence], bool]) -> Sequence | None:
        """The next one: the first that gave way, or else the next one that fits."""
        return self._returned[0] if self._returned else self.next_new(fits)

    def next_new(self, fits: Callable[[Sequence], bool]) -> Sequence | None:
        """The next one that fits, of those that never had a slot."""
        owner = self._next(fits)
        return None if owner is None else self._callers[owner.caller][owner].sequences[0]

    def seat(self, seq: Sequence) -> None:
        """Remove `first` or `next_new`, and count its slot."""
        if self._returned and seq is self._returned[0]:
            self._returned.popleft()
        else:
            self._take(seq.owner)
        self._slots[seq.owner.caller] += 1
        self._seated[seq.owner] += 1

    def _next(self, fits: Callable[[Sequence], bool]) -> Owner | None:
        """The request that gets the next slot, of those with a first sequence that fits."""
        offers = {caller: self._offers(caller, fits) for caller in self._callers}
        callers = [caller for caller, owners in offers.items() if owners]
        if not callers:
            return None
        return min(offers[min(callers, key=self._rank)], key=self._rank_of_request)

    def _take(self, owner: Owner) -> None:
        request = self._callers[owner.caller][owner]
        request.sequences.popleft()
        request.turn = self._served[owner.caller] = self._next_turn()
        self._forget_empty(owner)

    def unseat(self, seq: Sequence) -> None:
        """Count a slot that is free again."""
        _less(self._slots, seq.owner.caller)
        _less(self._seated, seq.owner)

    def _offers(self, caller: str, fits: Callable[[Sequence], bool]) -> list[Owner]:
        return [own for own, request in self._callers[caller].items() if fits(request.sequences[0])]

    def _rank(self, caller: str) -> tuple[int, int]:
        return self._slots[caller], self._served.get(caller, -1)

    def _rank_of_request(self, owner: Owner) -> tuple[int, int]:
        return self._seated[owner], self._callers[owner.caller][owner].turn

    def _next_turn(self) -> int:
        self._turn += 1
        return self._turn

    def _forget_empty(self, owner: Owner) -> None:
        requests = self._callers[owner.caller]
        if not requests[owner].sequences:
            del requests[owner]
        if not requests:
            del self._callers[owner.caller]


def _less(counts: Counter[Any], key: Any) -> None:
    """Decrement a count; a count of zero is removed."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
