"""The engine's thread: takes sequences from asyncio, and posts updates back to it."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Sequence as Seqs
from dataclasses import dataclass, replace
from functools import partial

from serve.lockstep import Leader, Orders
from specdec.core.engine import Engine
from specdec.core.errors import UserError
from specdec.core.sharing import QueueFull, Room
from specdec.core.stats import Passes
from specdec.core.types import CycleReport, Event, FinishReason, Sequence, TokenLogprob

log = logging.getLogger("specdec.serve")


class EngineStopped(Exception):
    """The engine's thread has ended, by a failure or a shutdown; the message contains the
    reason."""


@dataclass(frozen=True)
class Update:
    """What one cycle did to one sequence of a ticket. Written by the engine thread."""

    index: int
    """Index of the sequence in the ticket."""
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish: FinishReason | None = None
    error: str | None = None
    drafted: int = 0
    """Draft tokens of this sequence so far. A copy, because the engine's counters change."""
    accepted: int = 0
    cycles: int = 0
    emitted: int = 0
    passes: Passes | None = None
    """Its verify passes so far."""
    shutting_down: bool = False
    """Whether the server is shutting down, which is then the reason of the error."""
    report: CycleReport | None = None
    """The cycle's report, if `Sequence.reported`; None for the token that prefill chose."""
    joined: int = 1
    """How many updates it is made of."""

    @property
    def stands_alone(self) -> bool:
        """Whether it must not be joined with others: what it reports is of one cycle."""
        return self.report is not None or self.error is not None


def joined(updates: Seqs[Update]) -> Update:
    """Updates of one sequence, one after the other, as one."""
    if len(updates) == 1:  # nearly always: nothing is made anew for a token
        return updates[0]
    tokens = tuple(token for update in updates for token in update.tokens)
    logprobs = None
    if updates[-1].logprobs is not None:
        logprobs = tuple(each for update in updates for each in update.logprobs or ())
    return replace(updates[-1], tokens=tokens, logprobs=logprobs, joined=len(updates))


@dataclass(frozen=True)
class _Cancel:
    """A cancellation in the queue to the engine's thread, behind earlier submissions."""

    sequence: Sequence


class Mailbox:
    """Updates on their way to one reader, which takes all that have come: None where nothing came
    for a while. asyncio's own queue gives them one by one, for twice the time."""

    def __init__(self) -> None:
        self._items: list[Update | None] = []
        self._came: asyncio.Future[None] | None = None

    def put(self, item: Update | None) -> None:
        self._items.append(item)
        if self._came is not None and not self._came.done():
            self._came.set_result(None)

    async def take(self) -> list[Update | None]:
        """All that have come, in order; waits for the first."""
        await self._some()
        items, self._items = self._items, []
        return items

    def __aiter__(self) -> Mailbox:
        return self

    async def __anext__(self) -> Update:
        """The next update. Not a generator: one that its reader leaves is closed by a task of its
        own, which an event loop that ends then leaves pending."""
        while True:
            await self._some()
            if (item := self._items.pop(0)) is not None:
                return item

    async def _some(self) -> None:
        if not self._items:
            self._came = asyncio.get_running_loop().create_future()
            await self._came


@dataclass(frozen=True)
class Ticket:
    """One request's sequences, and where their updates arrive."""

    sequences: tuple[Sequence, ...]
    updates: Mailbox
    submitted: float
    """When, on the clock of `Sequence.seated`."""


class EngineRunner:
    """Owns the engine: after `start`, only its thread may use the engine.

    `start`, `submit` and `cancel` belong to one asyncio loop. `failure` is None until the thread
    ends.
    """

    def __init__(self, engine: Engine, leader: Leader | None = None) -> None:
        """leader: sends each step's orders to the other processes, if the model is split over
        several."""
        self.engine, self.leader = engine, leader
        self.failure: str | None = None
        self._submitted: queue.SimpleQueue[Sequence | _Cancel | None] = queue.SimpleQueue()
        self._live: dict[Sequence, tuple[Ticket, int]] = {}
        scheduler = engine.scheduler
        # Its count includes sequences on their way to the engine and cancelled ones that it has not
        # dropped yet, so the scheduler's own bound is never the first to be hit.
        self._room = Room(scheduler.slots, scheduler.max_waiting)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="specdec-engine", daemon=True)

    @property
    def capacity(self) -> int:
        """Most sequences that one caller may have in slots and waiting at once."""
        return self._room.capacity

    @property
    def running(self) -> int:
        """Sequences that hold a slot."""
        return self.engine.scheduler.slots - len(self.engine.scheduler.free)

    @property
    def prefilling(self) -> int:
        """Sequences that hold a slot while their prompt is read."""
        return len(self.engine.scheduler.prefilling)

    @property
    def decoding(self) -> int:
        return len(self.engine.scheduler.running)

    @property
    def waiting(self) -> int:
        return max(0, len(self._live) - self.running)

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the engine's thread; updates go to the running asyncio loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, sequences: Seqs[Sequence]) -> Ticket:
        """Queue one request's sequences, which have one owner: either all of them or none.

        Raises QueueFull if the queue has no room for them, EngineStopped if the engine has ended.
        """
        ticket = Ticket(tuple(sequences), Mailbox(), time.monotonic())
        with self._lock:
            if self.failure is not None:
                raise EngineStopped(self.failure)
            if sequences:
                self._room.take(sequences[0].owner.caller, len(sequences))
            for index, sequence in enumerate(sequences):
                self._live[sequence] = (ticket, index)
                self._submitted.put(sequence)
        return ticket

    def cancel(self, sequences: Seqs[Sequence]) -> None:
        """Drop the sequences before the engine's next cycle. Finished ones are not affected."""
        for sequence in sequences:
            self._submitted.put(_Cancel(sequence))

    def close(self, timeout: float = 30.0) -> None:
        """End the thread after its current step; unfinished sequences get an error update."""
        if self._thread.is_alive():
            self._submitted.put(None)
            self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while (orders := self._take_orders()) is not None:
                if self.leader is not None:
                    self.leader.announce(orders)
                self._deliver(self.engine.step())
            self._fail("the server is shutting down", shutting_down=True)
        except BaseException as failure:  # noqa: B036 - the thread must never end silently
            log.exception("the engine has failed")
            self._fail(f"the engine has failed ({type(failure).__name__}: {failure})")

    def _take_orders(self) -> Orders | None:
        """Submit queued sequences to the engine and mark cancelled ones; waits for a sequence if
        the engine is idle. Returns what was done, or None after `close`."""
        orders = Orders()
        while True:
            try:
                order = self._submitted.get(block=self.engine.idle)
            except queue.Empty:
                return orders
            if order is None:
                return None
            if isinstance(order, _Cancel):
                order.sequence.cancelled = True
                orders.cancelled.append(order.sequence)
                continue
            try:
                self.engine.submit(order)
                orders.submitted.append(order)
            except (UserError, QueueFull) as failure:  # fails this sequence only
                self._finish_early(order, str(failure))

    def _finish_early(self, sequence: Sequence, message: str) -> None:
        sequence.finish = "error"
        self._deliver([Event(sequence, (), "error", error=message)])

    def _deliver(self, events: list[Event]) -> None:
        updates: list[tuple[Ticket, Update]] = []
        for event in events:
            ticket, index = self._live[event.sequence]
            if event.finish is not None or self.engine.scheduler.pages is None:
                # large, and not read again: only for want of pages is a text read anew. Drafters
                # and loops keep a slot's last sequence
                event.sequence.pictures = ()
            if event.finish is not None:
                with self._lock:
                    del self._live[event.sequence]
                    self._room.leave(event.sequence.owner.caller)
            updates.append((ticket, _update(index, event, self.engine.drafting.k)))
        self._post(updates)

    def _fail(self, message: str, shutting_down: bool = False) -> None:
        """Refuse new sequences from now on, and end all live ones with an error update."""
        with self._lock:
            self.failure = message
            live, self._live = list(self._live.values()), {}
        last = partial(Update, tokens=(), finish="error", error=message)
        self._post([(ticket, last(i, shutting_down=shutting_down)) for ticket, i in live])

    def _post(self, updates: list[tuple[Ticket, Update]]) -> None:
        if not updates or self._loop is None:
            return
        try:  # one crossing per step, however many sequences
            self._loop.call_soon_threadsafe(_put_all, updates)
        except RuntimeError:  # the asyncio loop is closed
            log.info("dropped %d updates after the server's end", len(updates))


def _update(index: int, event: Event, k: int) -> Update:
    counts = event.sequence.acceptance
    return Update(
        index,
        event.tokens,
        event.logprobs,
        event.finish,
        event.error,
        drafted=counts.drafted,
        accepted=counts.accepted,
        cycles=counts.cycles,
        emitted=counts.emitted,
        passes=counts.passes(k),
        report=event.report,
    )


def _put_all(updates: list[tuple[Ticket, Update]]) -> None:
    for ticket, update in updates:
        ticket.updates.put(update)
