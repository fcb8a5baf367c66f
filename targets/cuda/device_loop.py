"""The captured driver: draft, verify, accept, commit as one CUDA graph; the host one cycle behind.

The captured function is `specdec.core.cycle.cycle`, the same as in the host loop, with a target and
a drafter that work on device tensors. Each slot's text, length and whether it goes on are kept on
the device. A call enqueues the next cycle before it reads the last one's results, so the device
never waits; rows that have ended meanwhile are idle in that cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seqs
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from specdec.core.constraint import constrained, fill_masks, forced_prefix_of, takes_known
from specdec.core.cycle import cycle
from specdec.core.protocols import Proposer
from specdec.core.script import Script, scripted_choice
from specdec.core.types import (
    NO_GUESS,
    SAT_OUT,
    CycleChoice,
    ForcedPrefix,
    LogprobRows,
    Proposal,
    Round,
    Sequence,
    Step,
)
from targets.cuda.device_drafter import CapturedBatch, DeviceDrafter, SlotState
from targets.cuda.graphs import Captured, CapturedParts, bucket_of
from targets.cuda.guides import ForcedPrefixDrafter, Guides
from targets.cuda.kernels import Kernels
from targets.cuda.out_of_memory import catching_oom
from targets.cuda.sampler import CycleRecord, CycleResult, HostRecords
from targets.cuda.script import PlacedScript, ScriptedDeviceDrafter
from targets.cuda.target import CudaTarget
from targets.cuda.upload import page_locked
from targets.cuda.verifier import Masks, logprobs_wanted, sampler_needed

STOPS = 16
"""Stop ids per row that the device checks (cycle.cu); the engine checks all of them in any case."""


@dataclass(frozen=True)
class GraphKey:
    """What one graph is captured for."""

    batch: int
    k: int
    needs_sampler: bool
    logprobs: bool
    guided: bool = False
    """Whether the host puts guesses first, and makes masks between the forward and the choice."""
    limited: bool = False
    """Whether any request allows fewer than k guesses."""
    variant: str = ""
    """`CycleChoice.variant`."""


class _CapturedTarget:
    """`Verifier` of the captured cycle."""

    def __init__(
        self, target: CudaTarget, masks: Masks | None, script: PlacedScript | None
    ) -> None:
        self.target, self.masks, self.script = target, masks, script

    def verify(self, batch: CapturedBatch, draft: torch.Tensor) -> Step:
        if draft.data_ptr() != batch.draft.data_ptr():  # most drafters write where it is read
            batch.draft.copy_(draft)
        wanted = batch.needs_sampler, batch.logprobs
        out = self.target.step(batch.rows, *wanted, self.masks)
        chosen = out.chosen
        if self.script is not None:
            scripted = self.script.coming(batch.rows, chosen.shape[1])
            chosen = scripted_choice(scripted, chosen)
        return Step(chosen, out.features, out.details)


class _LimitedDrafter:
    """`Proposer` of the captured cycle that limits each row's guesses to its request's maximum."""

    def __init__(self, drafter: DeviceDrafter, most: torch.Tensor) -> None:
        self._drafter, self._most = drafter, most

    def propose(self, batch: CapturedBatch, k: int) -> Proposal:
        own = self._drafter.propose(batch, k)
        most = self._most[batch.rows.slot.clamp(min=0).long()]
        wanted = torch.arange(k, device=most.device) < most[:, None]
        return replace(own, tokens=torch.where(wanted, own.tokens, NO_GUESS))

    def observe(self, batch: CapturedBatch, step: Step, accepted: torch.Tensor) -> None:
        self._drafter.observe(batch, step, accepted)


class Tape(NamedTuple):
    """A captured cycle's results on the device, beside the host's record."""

    details: LogprobRows | None
    proposal: Proposal


@dataclass(frozen=True)
class InParts:
    """A guided cycle: its graphs, and what the host puts between them."""

    slots: torch.Tensor
    records: HostRecords
    guides: Guides
    graphs: CapturedParts[Tape]
    drafted: torch.cuda.Event
    """When the draft is there."""
    side: torch.cuda.Stream
    """What the draft is read on."""


@dataclass(frozen=True)
class Launched:
    """A cycle under way. Its results are complete once `done` is reached."""

    seqs: tuple[Sequence | None, ...]
    """None: the row's results are not read."""
    words: torch.Tensor
    """The words of its `CycleRecord`."""
    proposal: Proposal
    """On the device; the host reads the record's guesses."""
    details: LogprobRows | None
    done: torch.cuda.Event
    forced_prefix: ForcedPrefix | None = None
    """In a guided cycle, which is read at once; it covers just the rows of this call."""


class Prepared(NamedTuple):
    """A call of the cycle: its rows, and the graphs to launch; None to launch none."""

    seqs: tuple[Sequence, ...]
    key: GraphKey | None


def device_loop(
    target: CudaTarget, drafter: DeviceDrafter, k: int, script: Script | None = None
) -> CapturedCycle:
    """A `Cycle` for the engine. script: the text that replaces the target's choices (speed
    tests)."""
    placed = None if script is None else PlacedScript(script, target.device)
    if placed is not None and placed.script.recorded:
        drafter = placed.script.wrap_weighted(
            drafter, partial(ScriptedDeviceDrafter, placed=placed)
        )
    return CapturedCycle(target, drafter, k, placed)


class CapturedCycle:
    """Graphs by `GraphKey`, the slots' state, and the one cycle that the host has not read yet."""

    def __init__(
        self, target: CudaTarget, drafter: DeviceDrafter, k: int, script: PlacedScript | None
    ) -> None:
        assert isinstance(target.ops, Kernels), "references wait for the host: no capture"
        self.target, self.ops, self.drafter, self.k = target, target.ops, drafter, k
        self.script = script
        assert target.pool is not None
        self.pool = target.pool

        def make(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=target.device)

        slots = target.slots
        self.state = SlotState(
            make(slots), make(slots), make(slots, STOPS), make(slots), make(slots)
        )
        self.owners: dict[int, tuple[Sequence, int]] = {}
        """By slot, with `seatings`: a sequence that gave way may get the same slot again."""
        self.graphs: dict[GraphKey, tuple[torch.Tensor, HostRecords, Captured[Tape]]] = {}
        self.fed: dict[GraphKey, tuple[int, ...]] = {}
        self.in_parts: dict[GraphKey, InParts] = {}
        self.pending: Launched | None = None

    def __call__(self, seqs: Seqs[Sequence], single: bool) -> list[Round]:
        prepared = self.prepare(seqs)
        return rounds(self.end(prepared, self.launch(prepared)), seqs)

    def prepare(self, seqs: Seqs[Sequence]) -> Prepared:
        """All that comes before a cycle is launched: nothing may be captured, or allocated by the
        driver, while other cards wait for this one."""
        self._seat([s for s in seqs if self.owners.get(s.slot) != (s, s.seatings)])
        choice = self.drafter.ready(seqs)
        guided = constrained(seqs) or takes_known(choice, seqs)
        if guided and self.pending is not None:  # guides follow from what it chose
            self.drafter.take_back()
            return Prepared(tuple(seqs), None)
        key = self._key(tuple(seqs), choice, guided)
        with catching_oom(f"a batch of {len(seqs)}"):  # else the last one stays to be read
            self._captured(key)
            self._feed(key, tuple(seqs))
        return Prepared(tuple(seqs), key)

    @torch.inference_mode()
    def launch(self, prepared: Prepared) -> ForcedPrefix | None:
        """The cycle's graphs, or of a guided one those before its masks; -> what it drafts without
        the drafter."""
        seqs, key = prepared
        if key is None:
            return None
        if key.guided:
            return self._launch_guided(seqs, key)
        _, _, graph = self.graphs[key]
        graph.replay()
        return None

    def end(self, prepared: Prepared, forced_prefix: ForcedPrefix | None) -> Launched | None:
        """Enqueue what is left of the cycle; -> the one that is to be read now."""
        seqs, key = prepared
        former, self.pending = self.pending, None
        if key is None:
            return former
        if key.guided:
            return self._end_guided(seqs, key, forced_prefix)
        _, records, graph = self.graphs[key]
        self.pending = _launched(seqs, graph.result, records.coming())
        return former

    def _key(self, seqs: tuple[Sequence, ...], choice: CycleChoice, guided: bool) -> GraphKey:
        return GraphKey(
            batch=bucket_of(len(seqs)),
            k=self.k if choice.depth is None else choice.depth,
            needs_sampler=sampler_needed(seqs),
            logprobs=logprobs_wanted(seqs),
            guided=guided,
            limited=any(seq.most_guesses(self.k) < self.k for seq in seqs),
            variant=choice.variant,
        )

    @torch.inference_mode()
    def _captured(self, key: GraphKey) -> None:
        if key.guided and key not in self.in_parts:
            self.in_parts[key] = self._capture_in_parts(key)
        elif not key.guided and key not in self.graphs:
            idle, records = self._blank(key)
            captured = Captured(lambda: self._cycle(key, idle, records), self.pool)
            records.begin()
            self.graphs[key] = idle, records, captured

    def _blank(self, key: GraphKey) -> tuple[torch.Tensor, HostRecords]:
        """Slots [B] of which none runs, and the records of the graph's cycles."""
        device = self.target.device
        idle = torch.full((key.batch,), -1, dtype=torch.int32, device=device)
        return idle, HostRecords(key.batch, key.k, device)

    def _launch_guided(self, seqs: tuple[Sequence, ...], key: GraphKey) -> ForcedPrefix | None:
        """Draft and forward: the host makes the masks of a draft while the forward runs."""
        parts = self.in_parts[key]
        draft, forward, _ = parts.graphs.parts
        forced_prefix = forced_prefix_of(seqs, key.k)
        parts.guides.put_first(None if forced_prefix is None else forced_prefix.rows)
        draft.replay()
        parts.drafted.record()
        forward.replay()
        return forced_prefix

    @torch.inference_mode()
    def _end_guided(
        self, seqs: tuple[Sequence, ...], key: GraphKey, forced_prefix: ForcedPrefix | None
    ) -> Launched:
        parts = self.in_parts[key]
        guides, choose = parts.guides, parts.graphs.parts[-1]
        with torch.cuda.stream(parts.side):  # beside the forward, which must not wait for it
            parts.side.wait_event(parts.drafted)
            guides.host_draft.copy_(parts.graphs.result.proposal.tokens, non_blocking=True)
        parts.side.synchronize()
        masks = guides.host_masks.numpy().view(np.uint32)
        fill_masks(seqs, guides.host_draft.numpy()[: len(seqs)], self.target.vocab, masks)
        guides.masks.copy_(guides.host_masks, non_blocking=True)
        choose.replay()
        launched = _launched(seqs, parts.graphs.result, parts.records.coming())
        return replace(launched, forced_prefix=forced_prefix)

    def _capture_in_parts(self, key: GraphKey) -> InParts:
        device = self.target.device
        guides = Guides.blank(key.batch, key.k, self.target.vocab, device)
        idle, records = self._blank(key)
        graphs = CapturedParts(lambda cut: self._cycle(key, idle, records, guides, cut), self.pool)
        records.begin()
        return InParts(idle, records, guides, graphs, torch.cuda.Event(), torch.cuda.Stream())

    @torch.inference_mode()
    def _feed(self, key: GraphKey, seqs: tuple[Sequence, ...]) -> None:
        """Set the rows that the graphs of this key run next: these sequences' slots."""
        wanted = tuple(seq.slot for seq in seqs)
        if self.fed.get(key) != wanted:
            padded = np.full(key.batch, -1, np.int32)
            padded[: len(wanted)] = wanted
            slots = self.in_parts[key].slots if key.guided else self.graphs[key][0]
            slots.copy_(page_locked(padded), non_blocking=True)
            self.fed[key] = wanted

    def _cycle(
        self,
        key: GraphKey,
        slots: torch.Tensor,
        records: HostRecords,
        guides: Guides | None = None,
        cut: Callable[[], None] = lambda: None,
    ) -> Tape:
        """The captured function. slots [B] on the device, -1 for padding. cut: in a guided cycle,
        called where the host takes the draft, and where it has written the masks."""
        state, sampler, history = self.state, self.ops.sampler, self.target.cache.tokens
        places = state.length, state.live
        rows = sampler.prepare_rows(history, places, slots, key.k, records.turn)
        batch = CapturedBatch(rows, key.needs_sampler, key.logprobs)
        drafter: Proposer[CapturedBatch] = self.drafter
        if key.limited:
            drafter = _LimitedDrafter(self.drafter, state.most)
        masks: Callable[[], torch.Tensor] | None = None
        if guides is not None:
            drafter = ForcedPrefixDrafter(drafter, guides.forced_prefix, cut)
            masks = partial(_masks_after, cut, guides)
        target = _CapturedTarget(self.target, masks, self.script)

        def accept(_: CapturedBatch, chosen: torch.Tensor) -> torch.Tensor:
            return sampler.accept(rows, chosen)

        done = cycle(target, drafter, batch, key.k, accept)
        result = CycleResult(done.step.chosen, done.accepted, done.proposal.source)
        sampler.commit(history, places, rows, result, (state.stops, state.limit), records)
        return Tape(done.step.logprobs, done.proposal)

    @torch.inference_mode()
    def _seat(self, seqs: Seqs[Sequence]) -> None:
        """Give slots to new sequences: write their lengths, last tokens, limits and stop ids."""
        if not seqs:
            return
        self._discard(seqs)
        stops = np.full((len(seqs), STOPS), NO_GUESS, np.int32)
        for b, seq in enumerate(seqs):
            known = sorted(seq.stop_ids)[:STOPS]
            stops[b, : len(known)] = known
            self.owners[seq.slot] = seq, seq.seatings
        device = self.target.device
        longest = self.target.max_len
        words = [
            [
                s.slot,
                len(s.tokens),
                s.tokens[-1],
                min(s.prompt_len + s.max_tokens, longest),
                s.most_guesses(self.k),
            ]
            for s in seqs
        ]

        def put(values: np.ndarray) -> torch.Tensor:
            return page_locked(values).to(device, non_blocking=True)

        slot, length, last, limit, most = put(np.array(words, np.int32)).unbind(1)
        at = slot.long()
        if self.script is not None:
            self.script.seat([seq.slot for seq in seqs])
        self.state.length[at], self.state.limit[at], self.state.most[at] = length, limit, most
        self.state.live[at] = 1
        self.state.stops[at] = put(stops)
        self.target.cache.tokens[at, length.long() - 1] = last

    def _discard(self, seqs: Seqs[Sequence]) -> None:
        """What is under way for sequences that gave way meanwhile: they choose it once more."""
        if self.pending is not None:
            kept = (None if seq in seqs else seq for seq in self.pending.seqs)
            self.pending = replace(self.pending, seqs=tuple(kept))


def _masks_after(cut: Callable[[], None], guides: Guides) -> torch.Tensor:
    """End the part of the graph whose draft the host takes; the next one reads the host's masks."""
    cut()
    return guides.masks


def _launched(seqs: tuple[Sequence, ...], tape: Tape, words: torch.Tensor) -> Launched:
    """The cycle of the graph that was replayed last. words: its record."""
    details = tape.details and tape.details.each(_to_host)
    done = torch.cuda.Event()
    done.record()
    return Launched(seqs, words, tape.proposal, details, done)


def _to_host(values: torch.Tensor) -> torch.Tensor:
    """Enqueue the copy to page-locked memory; torch keeps such memory for reuse."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    return host


def rounds(cycle_: Launched | None, seqs: Seqs[Sequence]) -> list[Round]:
    """What the engine gets of the cycle that is read, if any."""
    return [] if cycle_ is None else [_round(cycle_, seqs)]


def _round(cycle_: Launched, seqs: Seqs[Sequence]) -> Round:
    """Wait for a cycle; its round for these rows, SAT_OUT for those that were not in it."""
    cycle_.done.synchronize()
    where = {id(seq): row for row, seq in enumerate(cycle_.seqs)}
    rows = np.array([where.get(id(seq), -1) for seq in seqs])
    record = CycleRecord.of(cycle_.words.numpy()[rows])
    accepted = np.where(rows >= 0, record.accepted, SAT_OUT)
    details = cycle_.details and cycle_.details.each(lambda part: part.numpy()[rows])
    source = None if cycle_.proposal.source is None else record.source
    proposal = replace(cycle_.proposal, tokens=record.draft, source=source)
    return Round(proposal, Step(record.chosen, None, details), accepted, cycle_.forced_prefix)
