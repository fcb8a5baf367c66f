"""The captured driver: draft, verify, accept, commit as one CUDA graph; the host one cycle behind.

What is captured is `specdec.core.cycle.cycle`, with a target and a drafter whose methods work on
device tensors: one step, two drivers. Each slot's text, length and whether it goes on live on the
device. A call enqueues the next cycle before it reads what the last one did, so the device never
waits; rows that have ended meanwhile sit the cycle out.
"""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from specdec.core.cycle import cycle
from specdec.core.protocols import Cycle
from specdec.core.types import NO_GUESS, SAT_OUT, Array, LogprobRows, Round, Sequence, Step
from targets.cuda.device_drafter import CapturedBatch, DeviceDrafter, SlotState
from targets.cuda.graphs import Captured, bucket_of
from targets.cuda.kernels import Kernels
from targets.cuda.out_of_memory import room_for
from targets.cuda.sampling import each_part
from targets.cuda.target import CudaTarget

STOPS = 16
"""Stop ids per row that the device knows (cycle.cu); the engine cuts by all of them in any case."""


@dataclass(frozen=True)
class GraphKey:
    """What one graph is captured for."""

    batch: int
    k: int
    needs_sampler: bool
    logprobs: bool


class _CapturedTarget:
    """`Verifier` of the captured cycle."""

    def __init__(self, target: CudaTarget) -> None:
        self.target = target

    def verify(self, batch: CapturedBatch, draft: torch.Tensor) -> Step:
        if draft.data_ptr() != batch.draft.data_ptr():  # most drafters write where it is read
            batch.draft.copy_(draft)
        out = self.target.step(batch.rows, batch.needs_sampler, batch.logprobs)
        return Step(out.chosen, out.features, out.details)


class Tape(NamedTuple):
    """What a cycle did, on the device: draft, chosen and accepted side by side [B, 2 k + 2]."""

    words: torch.Tensor
    details: LogprobRows | None


@dataclass(frozen=True)
class Launched:
    """A cycle under way: its rows, what it will have said once `done` is reached."""

    seqs: tuple[Sequence, ...]
    key: GraphKey
    words: torch.Tensor
    details: LogprobRows | None
    done: torch.cuda.Event


def device_loop(
    target: CudaTarget, drafter: DeviceDrafter, k: int, synthetic: Array | None = None
) -> Cycle:
    """A `Cycle` for the engine. synthetic: int32 [cycles, slots], draft tokens to keep whatever
    was chosen (speed tests)."""
    return CapturedCycle(target, drafter, k, synthetic)


class CapturedCycle:
    """Graphs by `GraphKey`, the slots' state, and the one cycle that the host has not read yet."""

    def __init__(
        self, target: CudaTarget, drafter: DeviceDrafter, k: int, synthetic: Array | None
    ) -> None:
        assert isinstance(target.ops, Kernels), "references ask the host: they can't be captured"
        self.target, self.ops, self.drafter, self.k = target, target.ops, drafter, k
        self.table = None if synthetic is None else torch.from_numpy(synthetic).to(target.device)
        make = lambda *shape: torch.zeros(shape, dtype=torch.int32, device=target.device)  # noqa: E731
        slots = target.slots
        self.state = SlotState(make(slots), make(slots), make(slots, STOPS), make(slots), make(1))
        self.owners: dict[int, Sequence] = {}
        self.graphs: dict[GraphKey, tuple[torch.Tensor, Captured[Tape]]] = {}
        self.fed: dict[GraphKey, tuple[int, ...]] = {}
        self.pending: Launched | None = None

    def __call__(self, seqs: Seqs[Sequence], single: bool) -> list[Round]:
        self._seat([seq for seq in seqs if self.owners.get(seq.slot) is not seq])
        self.drafter.ready(seqs)
        with room_for(f"a batch of {len(seqs)}"):  # else the last one stays to be read
            launched = self._launch(tuple(seqs))
        former, self.pending = self.pending, launched
        return [] if former is None else [_read(former, seqs)]

    def _key(self, seqs: tuple[Sequence, ...]) -> GraphKey:
        needs_sampler = any(seq.sampling.needs_sampler for seq in seqs)
        logprobs = any(seq.sampling.logprobs is not None for seq in seqs)
        return GraphKey(bucket_of(len(seqs)), self.k, needs_sampler, logprobs)

    @torch.inference_mode()
    def _launch(self, seqs: tuple[Sequence, ...]) -> Launched:
        key = self._key(seqs)
        if key not in self.graphs:
            idle = torch.full((key.batch,), -1, dtype=torch.int32, device=self.target.device)
            self.graphs[key] = idle, Captured(lambda: self._cycle(key, idle), self.target.pool)
        slots, graph = self.graphs[key]
        wanted = tuple(seq.slot for seq in seqs)
        if self.fed.get(key) != wanted:
            padded = np.full(key.batch, -1, np.int32)
            padded[: len(wanted)] = wanted
            slots.copy_(torch.from_numpy(padded))
            self.fed[key] = wanted
        tape = graph.replay()
        words = _to_host(tape.words)
        parts = tape.details and each_part(_to_host, tape.details)
        done = torch.cuda.Event()
        done.record()
        return Launched(seqs, key, words, parts, done)

    def _cycle(self, key: GraphKey, slots: torch.Tensor) -> Tape:
        """What is captured. slots [B] on the device, -1 for padding."""
        state, sampler, history = self.state, self.ops.sampler, self.target.cache.tokens
        places = state.length, state.live
        rows = sampler.lay_out(history, places, slots, key.k)
        batch = CapturedBatch(rows, key.needs_sampler, key.logprobs)
        done = cycle(_CapturedTarget(self.target), self.drafter, batch, key.k)
        accepted = done.accepted.int()
        if self.table is not None:
            turn = self.table[state.cycles % len(self.table)][0]
            accepted = turn.index_select(0, slots.clamp(min=0)).clamp(max=key.k)
        chosen = done.step.chosen
        sampler.commit(history, places, rows, chosen, accepted, (state.stops, state.limit))
        state.cycles.add_(1)
        words = torch.cat([done.draft, chosen, accepted[:, None]], 1)
        return Tape(words, done.step.logprobs)

    @torch.inference_mode()
    def _seat(self, seqs: Seqs[Sequence]) -> None:
        """New owners: what the host knows of them goes to their slots."""
        if not seqs:
            return
        stops = np.full((len(seqs), STOPS), NO_GUESS, np.int32)
        for b, seq in enumerate(seqs):
            known = sorted(seq.stop_ids)[:STOPS]
            stops[b, : len(known)] = known
            self.owners[seq.slot] = seq
        device = self.target.device
        longest = self.target.max_len
        words = [
            [s.slot, len(s.tokens), s.tokens[-1], min(s.prompt_len + s.max_tokens, longest)]
            for s in seqs
        ]
        slot, length, last, limit = torch.tensor(words, dtype=torch.int32).to(device).unbind(1)
        at = slot.long()
        self.state.length[at], self.state.limit[at] = length, limit
        self.state.live[at] = 1
        self.state.stops[at] = torch.from_numpy(stops).to(device)
        self.target.cache.tokens[at, length.long() - 1] = last


def _to_host(values: torch.Tensor) -> torch.Tensor:
    """Enqueue the copy to page-locked memory; torch keeps such memory for reuse."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    return host


def _read(cycle_: Launched, seqs: Seqs[Sequence]) -> Round:
    """Wait for a cycle; its round for these rows, SAT_OUT for those that were not in it."""
    cycle_.done.synchronize()
    k, words = cycle_.key.k, cycle_.words.numpy()
    where = {id(seq): row for row, seq in enumerate(cycle_.seqs)}
    rows = np.array([where.get(id(seq), -1) for seq in seqs])
    mine = words[rows]
    accepted = np.where(rows >= 0, mine[:, -1], SAT_OUT)
    details = cycle_.details and each_part(lambda part: part.numpy()[rows], cycle_.details)
    return Round(mine[:, :k], Step(mine[:, k : 2 * k + 1], None, details), accepted)
