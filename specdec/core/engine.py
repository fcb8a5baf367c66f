"""The engine: admit, prefill a chunk, run the cycle, emit. Token ids in, events out; one thread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from time import monotonic, perf_counter

import numpy as np

from specdec.core.errors import UserError
from specdec.core.logprobs import StepLogprobs
from specdec.core.pages import Pages
from specdec.core.policy.choice import Policy
from specdec.core.prefix_cache.cache import PrefixCache
from specdec.core.protocols import Cycle, Drafter, Target
from specdec.core.reporting import first_sources, forced_guesses, report_of
from specdec.core.scheduler import Scheduler
from specdec.core.stats import Acceptance, Drafts, Guesses
from specdec.core.timing import EngineTimes
from specdec.core.types import (
    NO_GUESS,
    SAT_OUT,
    Event,
    FinishReason,
    Guesser,
    Round,
    Sequence,
    Step,
    TokenLogprob,
)


@dataclass(frozen=True)
class DraftSetup:
    """The drafters and depth of an engine."""

    drafter: str = "none"
    parts: tuple[str, ...] = ()
    """The drafters that it combines; requests may choose one of them."""
    k: int = 0
    policy: Policy | None = None
    """The policy that chooses among these; None for a single drafter."""

    @property
    def names(self) -> tuple[str, ...]:
        """What a request may name, beside none."""
        return (self.drafter, *self.parts)


class Engine:
    """Continuous batching over the target's slots.

    The cycle is *given* as a value (`host_cycle` or a device-resident one), so speculation has one
    definition and several drivers. Call `submit` and `step` from one thread.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        cycle: Cycle,
        max_waiting: int = 256,
        prefix_cache: PrefixCache | None = None,
        drafting: DraftSetup | None = None,
        pages: Pages | None = None,
    ) -> None:
        """drafting: the configured drafters, for request validation and /metrics. pages: of the
        target's cache, as `LoadedTarget.pages`."""
        self.target = target
        self.drafter = drafter
        self.cycle = cycle
        self.prefix_cache, self.drafting = prefix_cache, drafting or DraftSetup()
        self.scheduler = Scheduler(target.slots, max_waiting, target.prefill_chunk, pages)
        self._parts: Iterator[Step | None] = iter(())
        """The rest of the chunk that `scheduler.reading` is in."""
        self.times = EngineTimes()
        self.count_anew()

    def count_anew(self) -> None:
        """Reset all counters."""
        self.acceptance = Acceptance()
        self.forced: dict[Guesser, Guesses] = {"prediction": Guesses(), "constraint": Guesses()}
        """Counts of the guesses that did not come from the drafter."""
        self.drafts: defaultdict[str, Drafts] = defaultdict(Drafts)
        """Passes by the source of the draft's first guess; none: without a guess."""
        self.times = EngineTimes(plain_costs=self.times.plain_costs)
        self.gave_way = 0
        """How often a sequence left its slot for others' texts, to be read again later."""

    def submit(self, seq: Sequence) -> None:
        """Queue a sequence. Raises UserError if it can't ever fit, QueueFull if it can't now."""
        self.check(seq)
        self.scheduler.submit(seq)

    def check(self, seq: Sequence) -> None:
        """Raise UserError where the sequence can't ever fit."""
        if seq.prompt_len >= self.target.max_len:
            raise UserError(
                f"the prompt has {seq.prompt_len} tokens but the context is "
                f"{self.target.max_len}: shorten it or start with a larger --max-len"
            )

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def step(self) -> list[Event]:
        """Free cancelled slots, seat waiting sequences, prefill one chunk, run the cycle."""
        began, known = perf_counter(), self.times.known
        events = self._step()
        self.times.stepped(perf_counter() - began, known)
        return events

    def _step(self) -> list[Event]:
        events = self._drop_cancelled()
        for seq in self.scheduler.admit():
            seq.seated = seq.seated or monotonic()
            if self.prefix_cache is not None:
                seq.kept = self.prefix_cache.found(seq)
            self.drafter.reset(seq)
        events += self._prefill()
        self._make_room()
        if self.scheduler.running:
            events += self._decode(tuple(self.scheduler.running))
        return events

    def _make_room(self) -> None:
        """Pages for what the next cycle may add to each text."""
        gone = self.scheduler.grow()
        self.gave_way += len(gone)
        if gone and self.scheduler.reading is None:
            self._parts = iter(())
        if self.prefix_cache is not None:
            for seq in gone:
                self.prefix_cache.forget(seq)

    def _drop_cancelled(self) -> list[Event]:
        """Where prompts are kept, one of which a part of a chunk has been read stays for that
        chunk: until its end the rings of some layers are ahead of those of the others."""
        stays = None
        if self.prefix_cache is not None:
            stays = self.scheduler.reading
            for seq in self.scheduler.prefilling:
                if seq.cancelled and seq is not stays:
                    self.prefix_cache.leave(seq)
        gone = self.scheduler.drop_cancelled(stays)
        if self.scheduler.reading is None:
            self._parts = iter(())
        for seq in gone:
            seq.finish = "cancelled"
        return [Event(seq, (), "cancelled") for seq in gone]

    def _decode(self, rows: tuple[Sequence, ...]) -> list[Event]:
        began = perf_counter()
        try:
            rounds = self.cycle(rows, bool(self.scheduler.prefilling))
        except MemoryError as refusal:  # the row that joined last fails, the others go on
            if self.prefix_cache is not None and self.prefix_cache.give_way():
                return []  # the next step tries again
            return [self._finish(rows[-1], (), "error", error=f"decode: {refusal}")]
        seconds = self.times.dispatched(rounds, perf_counter() - began)
        return [event for done in rounds for event in self._emit_round(rows, done, seconds)]

    def run(self, seqs: list[Sequence]) -> Iterator[Event]:
        """Submit all, step until idle, yield every event (for commands and tests)."""
        for seq in seqs:
            self.submit(seq)
        while not self.idle:
            yield from self.step()

    def run_to_end(self, seqs: list[Sequence]) -> None:
        """`run` without events. Raises UserError where a sequence fails."""
        for event in self.run(seqs):
            if event.error is not None:
                raise UserError(event.error)

    def _prefill(self) -> list[Event]:
        chunk = self.scheduler.next_chunk()
        if chunk is None:
            return []
        began = perf_counter()
        seqs = self._together(*chunk)
        events = self._read_prompts(seqs) if len(seqs) > 1 else self._read_chunk(*chunk)
        self.times.add("prefill", perf_counter() - began)
        if self.drafting.policy is not None:
            self.drafting.policy.prompt_reads += 1
        return events

    def _together(self, seq: Sequence, start: int, stop: int) -> list[Sequence]:
        """The sequence, and others with prompts that the target reads in the same call."""
        alone = bool(seq.pictures) or seq is self.scheduler.reading
        if alone or start > 0 or stop != seq.prompt_len:
            return [seq]
        seqs = [seq, *self.scheduler.beside(seq)]
        return [seqs[i] for i in self.target.together([s.prompt_len for s in seqs])]

    def _read_prompts(self, seqs: list[Sequence]) -> list[Event]:
        """Prompts of a chunk at most: no prefix of one is kept."""
        try:
            steps = self.target.prefill_all(seqs)
        except (UserError, MemoryError):  # of one of them: each alone, and the others go on
            return [e for seq in seqs for e in self._read_chunk(seq, 0, seq.prompt_len)]
        if self.prefix_cache is not None:
            for seq in seqs:
                self.prefix_cache.resume(seq)  # counts its tokens
        pairs = zip(seqs, steps, strict=True)
        return [e for seq, step in pairs for e in self._was_read(seq, 0, seq.prompt_len, step)]

    def _read_chunk(self, seq: Sequence, start: int, stop: int) -> list[Event]:
        """Read a chunk, or a part of one. While another's is read in part, all of it."""
        reading = self.scheduler.reading
        try:
            if seq is reading:
                parts = self._parts
            else:
                if start == 0 and self.prefix_cache is not None:
                    start = self.prefix_cache.resume(seq)
                    stop = self.scheduler.resume(seq, start)
                parts = self.target.prefill_parts(seq, start, stop)
            step = next(parts)
            while step is None and reading is not None and reading is not seq:
                step = next(parts)
        except (UserError, MemoryError) as refusal:
            return self._refused(seq, refusal)
        if step is None:
            self.scheduler.reading, self._parts = seq, parts
            return []
        if seq is reading:
            self._parts = iter(())  # its memory goes
        return self._was_read(seq, start, stop, step)

    def _was_read(self, seq: Sequence, start: int, stop: int, step: Step) -> list[Event]:
        """Of a chunk: the drafter reads it too, and a prompt's first token is emitted."""
        try:
            self.drafter.prefill(seq, start, stop, step)
        except (UserError, MemoryError) as refusal:
            return self._refused(seq, refusal)
        if self.prefix_cache is not None:
            self.prefix_cache.keep(seq, stop)
        if not self.scheduler.chunk_done(seq, stop) or seq.emitted:
            return []  # what follows was chosen before it gave way
        return [self._emit(seq, np.asarray(step.chosen)[0].tolist(), _told(step), 0)]

    def _refused(self, seq: Sequence, refusal: Exception) -> list[Event]:
        """End a sequence after a failed prefill; the others go on. If memory is short and the
        prefix cache could evict, the prompt begins anew instead (from its start or a kept
        boundary), as a chunk may have been written in part."""
        no_room = isinstance(refusal, MemoryError)
        if no_room and self.prefix_cache is not None and self.prefix_cache.give_way():
            self.scheduler.resume(seq, 0)
            self.drafter.reset(seq)
            return []
        return [self._finish(seq, (), "error", error=f"prefill: {refusal}")]

    def _emit_round(self, rows: tuple[Sequence, ...], done: Round, seconds: float) -> list[Event]:
        # lists, once for all rows: numpy's scalars, one by one, cost the host more
        chosen, accepted = np.asarray(done.step.chosen).tolist(), np.asarray(done.accepted).tolist()
        drafted = (np.asarray(done.proposal.tokens) != NO_GUESS).tolist()
        sources, forced_of = first_sources(done.proposal), forced_guesses(done)
        told, events = _told(done.step), []
        for b, seq in enumerate(rows):
            n = accepted[b]
            # ended in an earlier round of the same dispatch, or not part of this cycle
            if seq.finish is not None or n == SAT_OUT:
                continue
            event = self._emit(seq, chosen[b][: n + 1], told, b)
            self._count(seq, drafted[b], n, len(event.tokens))
            forced, source = forced_of[b]
            if forced:
                self.forced[source].add(forced, min(n, len(event.tokens)))
            first = source if forced else sources[b]
            self.drafts[first if any(drafted[b]) else "none"].add(len(event.tokens))
            if seq.reported:
                report = report_of(done, b, forced_of[b], len(event.tokens), seconds)
                event = replace(event, report=report)
            events += _apart(event)
        self.times.emitted(sum(len(event.tokens) for event in events), len(events))
        return events

    def _count(self, seq: Sequence, drafted: list[bool], accepted: int, emitted: int) -> None:
        before = len(seq.tokens) - emitted
        for stats in (seq.acceptance, self.acceptance):
            stats.add(drafted, min(accepted, emitted), emitted, before)

    def _emit(self, seq: Sequence, chosen: list[int], told: StepLogprobs | None, row: int) -> Event:
        """Append the chosen tokens, cut at a stop id or a limit; tokens beyond are discarded."""
        failure = None if seq.constraint is None else seq.constraint.failure
        tokens, finish = _cut_by_grammar(seq, chosen, self.target.max_len)
        seq.tokens.extend(tokens)
        details = None if told is None else told.of(seq, row, len(tokens))
        if finish is None:
            return Event(seq, tuple(tokens), None, details)
        error = failure if finish == "error" else None
        return self._finish(seq, tuple(tokens), finish, details, error)

    def _finish(
        self,
        seq: Sequence,
        tokens: tuple[int, ...],
        finish: FinishReason,
        logprobs: tuple[TokenLogprob, ...] | None = None,
        error: str | None = None,
    ) -> Event:
        seq.finish = finish
        self.scheduler.release(seq)
        return Event(seq, tokens, finish, logprobs, error)


def _cut_by_grammar(
    seq: Sequence, chosen: list[int], max_len: int
) -> tuple[list[int], FinishReason | None]:
    """`_cut`, or cut where the sequence's grammar can't be followed any further, if that is
    first."""
    constraint = seq.constraint
    if constraint is None:
        return _cut(seq, chosen, max_len)
    end: FinishReason = "grammar_limit" if constraint.failure is None else "error"
    if constraint.ends_at is not None:
        room = constraint.ends_at - seq.emitted
    else:
        room = len(chosen) if constraint.failure is None else 0
    if room >= len(chosen):
        return _cut(seq, chosen, max_len)
    if room <= 0:
        return [], end
    tokens, finish = _cut(seq, chosen[:room], max_len)
    return tokens, finish or end


def _apart(event: Event) -> list[Event]:
    """What was emitted before an error, and the error: two events, as without a draft."""
    if event.error is None or not event.tokens:
        return [event]
    emitted = replace(event, finish=None, error=None)
    return [emitted, Event(event.sequence, (), event.finish, error=event.error)]


def _cut(seq: Sequence, chosen: list[int], max_len: int) -> tuple[list[int], FinishReason | None]:
    room = min(seq.max_tokens - seq.emitted, max_len - len(seq.tokens))
    for i, token in enumerate(chosen[:room]):
        if token in seq.stop_ids:
            return chosen[: i + 1], "stop"
    if len(chosen) >= room:
        return chosen[:room], "length"
    return chosen, None


def _told(step: Step) -> StepLogprobs | None:
    return None if step.logprobs is None else StepLogprobs(step.logprobs)
