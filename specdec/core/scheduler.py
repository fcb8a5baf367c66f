"""Schedules sequences: a bounded queue in front of a set of slots. How slots are shared over
callers: `sharing`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from specdec.core.pages import Pages
from specdec.core.pictures import chunk_end
from specdec.core.sharing import Room, Waiting
from specdec.core.types import Sequence

TURNS = 2
"""Prompts that are read in turns: the first, and the one with the fewest tokens left."""


@dataclass
class Scheduler:
    """A sequence is in exactly one of waiting, prefilling, running."""

    slots: int
    max_waiting: int
    chunk: int
    """Prefill chunks end at absolute multiples of this, or at a picture that lies across one,
    independent of other sequences: the cut determines the order of reductions, so it must not
    depend on load."""
    pages: Pages | None = None
    """Of the target's cache; None where each slot has room for the longest text."""
    waiting: Waiting = field(default_factory=Waiting)
    prefilling: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    seated: list[Sequence] = field(default_factory=list)
    """Those that are prefilling or running, in the order in which they got their slots."""

    def __post_init__(self) -> None:
        self.free = list(range(self.slots))[::-1]
        if self.pages is not None:  # who fed slots by itself is done
            for slot in self.free:
                self.pages.release(slot)
        self._least_left = {"chunk": True, "part": True}
        """Whether the last turn was that of the prompt with the fewest tokens left."""
        self._passed: list[Sequence] = []
        """Sequences that were seated before one that was first and had no room."""
        self.reading: Sequence | None = None
        """The sequence of which a part of a chunk has been read. Written by the engine too."""
        self._room = Room(self.slots, self.max_waiting)

    def submit(self, seq: Sequence) -> None:
        """Queue a sequence; raises QueueFull at the bound (free slots count as room)."""
        self._room.take(seq.owner.caller)
        self.waiting.append(seq)

    def drop_cancelled(self, stays: Sequence | None = None) -> list[Sequence]:
        """Take every cancelled sequence but `stays` out, wherever it is, and free its slot."""
        seqs = *self.waiting, *self.prefilling, *self.running
        gone = [seq for seq in seqs if seq.cancelled and seq is not stays]
        for seq in gone:
            self.release(seq)
        return gone

    def admit(self) -> list[Sequence]:
        """Give free slots to the next in turn, as long as there are pages for its text; returns the
        newly seated."""
        seated = []
        while self.free and (seq := self._next_to_seat()) is not None:
            self.waiting.seat(seq)
            seq.slot = self.free.pop()
            seq.seatings += 1
            self.prefilling.append(seq)
            self.seated.append(seq)
            if self.pages is not None:
                self.pages.reserve(seq.slot, len(seq.tokens))
            seated.append(seq)
        return seated

    def _next_to_seat(self) -> Sequence | None:
        longest = self._longest_seated()

        def fits(seq: Sequence) -> bool:
            return longest is None or seq.prompt_len <= longest

        first = self.waiting.first(fits)
        if first is None or self._has_room(first):
            return first
        other = self.waiting.next_new(lambda seq: fits(seq) and self._may_pass(first, seq))
        if other is not None:
            self._passed.append(other)
        return other

    def _has_room(self, seq: Sequence) -> bool:
        return self.pages is None or self.pages.has_room(len(seq.tokens))

    def _may_pass(self, first: Sequence, seq: Sequence) -> bool:
        """Whether `seq` may be seated before the first, which has no room. The first waits no
        longer for that: a slot and pages are left to it, once those end that were seated before."""
        if self.pages is None or len(self.free) < TURNS or not self._has_room(seq):
            return False
        held = sum(self.pages.held[other.slot] for other in self._passed if other.slot >= 0)
        needed = self.pages.plan.needed
        return held + needed(len(seq.tokens)) + needed(len(first.tokens)) < self.pages.plan.total

    def grow(self) -> list[Sequence]:
        """Reserve what the next cycle may add to each running text; where no page is left, the last
        to join gives way. Returns those that did."""
        gone: list[Sequence] = []
        if self.pages is None:
            return gone
        for seq in tuple(self.running):
            while seq.slot >= 0 and not self.pages.reserve(seq.slot, len(seq.tokens)):
                gone.append(self.seated[-1])
                self._give_way(self.seated[-1])
        return gone

    def _give_way(self, seq: Sequence) -> None:
        """Back to the queue's front. Its text is read again when it is seated next: the prompt as
        it was read first, then what was emitted, as it was decoded."""
        self._leave_slot(seq)
        self.waiting.put_back(seq)
        seq.prefilled = 0

    def _longest_seated(self) -> int | None:
        """The most tokens of a prompt that may be seated now; None: any number. While long prompts
        take both turns of `next_chunk`, a further one would hold its slot unread: the last slot is
        left to a prompt of half their length, which is read at once."""
        long = [left for left in map(_left_to_read, self.prefilling) if left > self.chunk]
        if len(self.free) > 1 or len(long) < TURNS:
            return None
        return max(self.chunk, min(long) // 2)

    def next_chunk(self) -> tuple[Sequence, int, int] | None:
        """The (sequence, start, stop) to prefill in this turn, or None. Turns alternate between the
        sequence that was seated first and the one with the fewest tokens left. So a short prompt
        waits for a part of a long one's chunk, and a long one gets at least every other turn. Where
        a chunk has been read in part, only prompts of half a chunk get in between."""
        if not self.prefilling:
            return None
        # apart, for an even number of parts would give all chunks to the same side
        kind = "chunk" if self.reading is None else "part"
        self._least_left[kind] = not self._least_left[kind]
        seq = self.prefilling[0]
        if self._least_left[kind]:
            seq = min(self.prefilling, key=_left_to_read)
        if self.reading is not None and 2 * _left_to_read(seq) > self.chunk:
            seq = self.reading
        return seq, seq.prefilled, self._chunk_end(seq)

    def beside(self, seq: Sequence) -> list[Sequence]:
        """Other prompts that could be read in the same turn: whole, from their start, and without
        pictures."""
        return [
            other
            for other in self.prefilling
            if other is not seq
            and other is not self.reading
            and other.prefilled == 0
            and not other.pictures
            and other.prompt_len <= self.chunk
        ]

    def resume(self, seq: Sequence, start: int) -> int:
        """Record that the first `start` tokens of the prompt, whole chunks, are in the KV cache
        without prefill (0: none). Returns the end of the next chunk."""
        seq.prefilled = seq.kept = start
        if not seq.emitted:
            seq.cached = start
        self._forget(seq)
        return self._chunk_end(seq)

    def chunk_done(self, seq: Sequence, stop: int) -> bool:
        """Record a prefilled chunk; True where the text is complete and decoding may begin."""
        seq.prefilled = stop
        self._forget(seq)
        if seq.fed > stop:
            return False
        self.prefilling.remove(seq)
        self.running.append(seq)
        return True

    def _forget(self, seq: Sequence) -> None:
        if self.reading is seq:
            self.reading = None

    def _chunk_end(self, seq: Sequence) -> int:
        """What was emitted before it gave way is read again with the bits of decoding."""
        if self.pages is not None and seq.prefilled >= seq.prompt_len:
            return min(seq.prefilled + self.pages.plan.reread, seq.fed)
        return chunk_end(seq.prefilled, self.chunk, seq.prompt_len, seq.pictures)

    def release(self, seq: Sequence) -> None:
        """Take a sequence out and free its slot, if it has one."""
        self._room.leave(seq.owner.caller)
        if seq in self._passed:
            self._passed.remove(seq)
        if seq.slot < 0:
            self.waiting.remove(seq)
            return
        self._leave_slot(seq)

    def _leave_slot(self, seq: Sequence) -> None:
        self._forget(seq)
        (self.running if seq in self.running else self.prefilling).remove(seq)
        self.seated.remove(seq)
        self.waiting.unseat(seq)
        self.free.append(seq.slot)
        if self.pages is not None:
            self.pages.release(seq.slot)
        seq.slot = -1
        self.check()

    def check(self) -> None:
        """Every slot is either free or held by exactly one seated sequence."""
        held = [s.slot for s in (*self.prefilling, *self.running)]
        assert sorted(held + self.free) == list(range(self.slots)), (held, self.free)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.prefilling or self.running)


def _left_to_read(seq: Sequence) -> int:
    return seq.fed - max(seq.prefilled, seq.kept)
