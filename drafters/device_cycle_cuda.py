"""The captured driver: draft, verify, accept, commit as one CUDA graph; the host one cycle behind.

What is captured is `specdec.cycle.cycle` itself, with a target and a drafter whose methods work on
device tensors: one step, two drivers. Each slot's text, length and whether it goes on live on the
device. A call enqueues the next cycle before it reads what the last one did, so the device never
waits; rows that have ended meanwhile sit the cycle out.
"""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from drafters.resident_cuda import Resident, State
from specdec.cycle import cycle
from specdec.protocols import Cycle
from specdec.types import NO_GUESS, SAT_OUT, Array, LogprobRows, Round, Sequence, Step
from targets.cuda.graphs import Captured, bucket_of
from targets.cuda.kernels import Kernels
from targets.cuda.ops import Rows
from targets.cuda.room import room_for
from targets.cuda.sampling import each_part
from targets.cuda.target import CudaTarget

STOPS = 16
"""Stop ids per row that the device knows (cycle.cu); the engine cuts by all of them in any case."""


@dataclass(frozen=True)
class Job:
    """What one graph is captured for."""

    batch: int
    k: int
    shaped: bool
    logprobs: bool


class _Captured:
    """`Drafter` and `Target` of the captured cycle: the rows are what the drafter lays out."""

    def __init__(self, target: CudaTarget, drafter: Resident, state: State, job: Job) -> None:
        self.target, self.drafter, self.state, self.job = target, drafter, state, job
        self.rows: Rows | None = None

    def propose(self, slots: Any, k: int) -> torch.Tensor:
        self.rows = self.drafter.propose(self.state, slots, k, self.job.shaped)
        return self.rows.tokens[:, 1:]

    def verify(self, slots: Any, draft: torch.Tensor) -> Step:
        assert self.rows is not None
        out = self.target.step(self.rows, self.job.shaped, self.job.logprobs)
        return Step(out.chosen, out.features, out.details)

    def observe(self, slots: Any, step: Step, accepted: Array) -> None:
        assert self.rows is not None
        self.drafter.observe(self.rows, step, accepted)


class Tape(NamedTuple):
    """What a cycle did, on the device: draft, chosen and accepted side by side [B, 2 k + 2]."""

    words: torch.Tensor
    details: LogprobRows | None


@dataclass(frozen=True)
class Launched:
    """A cycle under way: its rows, what it will have said once `done` is reached."""

    seqs: tuple[Sequence, ...]
    job: Job
    words: torch.Tensor
    details: LogprobRows | None
    done: torch.cuda.Event


def device_cycle(
    target: CudaTarget, drafter: Resident, k: int, synthetic: Array | None = None
) -> Cycle:
    """A `Cycle` for the engine. synthetic: int32 [cycles, slots], draft tokens to keep whatever
    was chosen (speed tests)."""
    return CapturedCycle(target, drafter, k, synthetic)


class CapturedCycle:
    """Graphs by `Job`, the slots' state, and the one cycle that the host has not read yet."""

    def __init__(
        self, target: CudaTarget, drafter: Resident, k: int, synthetic: Array | None
    ) -> None:
        assert isinstance(target.ops, Kernels), "references ask the host: they can't be captured"
        self.target, self.ops, self.drafter, self.k = target, target.ops, drafter, k
        self.table = None if synthetic is None else torch.from_numpy(synthetic).to(target.device)
        make = lambda *shape: torch.zeros(shape, dtype=torch.int32, device=target.device)  # noqa: E731
        slots = target.slots
        self.state = State(make(slots), make(slots), make(slots, STOPS), make(slots), make(1))
        self.owners: dict[int, Sequence] = {}
        self.graphs: dict[Job, tuple[torch.Tensor, Captured[Tape]]] = {}
        self.fed: dict[Job, tuple[int, ...]] = {}
        self.pending: Launched | None = None

    def __call__(self, seqs: Seqs[Sequence], hurry: bool) -> list[Round]:
        self._seat([seq for seq in seqs if self.owners.get(seq.slot) is not seq])
        self.drafter.ready(seqs)
        with room_for(f"a batch of {len(seqs)}"):  # else the last one stays to be read
            launched = self._launch(tuple(seqs))
        former, self.pending = self.pending, launched
        return [] if former is None else [_read(former, seqs)]

    def _job(self, seqs: tuple[Sequence, ...]) -> Job:
        shaped = any(seq.sampling.shaped for seq in seqs)
        logprobs = any(seq.sampling.logprobs is not None for seq in seqs)
        return Job(bucket_of(len(seqs)), self.k, shaped, logprobs)

    @torch.inference_mode()
    def _launch(self, seqs: tuple[Sequence, ...]) -> Launched:
        job = self._job(seqs)
        if job not in self.graphs:
            idle = torch.full((job.batch,), -1, dtype=torch.int32, device=self.target.device)
            self.graphs[job] = idle, Captured(lambda: self._cycle(job, idle), self.target.pool)
        slots, graph = self.graphs[job]
        wanted = tuple(seq.slot for seq in seqs)
        if self.fed.get(job) != wanted:
            padded = np.full(job.batch, -1, np.int32)
            padded[: len(wanted)] = wanted
            slots.copy_(torch.from_numpy(padded))
            self.fed[job] = wanted
        tape = graph.replay()
        words = _to_host(tape.words)
        parts = tape.details and each_part(_to_host, tape.details)
        done = torch.cuda.Event()
        done.record()
        return Launched(seqs, job, words, parts, done)

    def _cycle(self, job: Job, slots: torch.Tensor) -> Tape:
        """What is captured. The rows are slot numbers [B] on the device."""
        both: Any = _Captured(self.target, self.drafter, self.state, job)
        rows: Any = slots
        done = cycle(both, both, rows, job.k)
        accepted = done.accepted.int()
        if self.table is not None:
            turn = self.table[self.state.cycles % len(self.table)][0]
            accepted = turn.index_select(0, slots.clamp(min=0)).clamp(max=job.k)
        places, limits = self.state[:2], self.state[2:4]
        history, chosen = self.target.cache.tokens, done.step.chosen
        self.ops.choosing.commit(history, places, both.rows, chosen, accepted, limits)
        self.state.cycles.add_(1)
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
    """Wait for a cycle and say what it did for these rows; who was not in it sat it out."""
    cycle_.done.synchronize()
    k, words = cycle_.job.k, cycle_.words.numpy()
    where = {id(seq): row for row, seq in enumerate(cycle_.seqs)}
    rows = np.array([where.get(id(seq), -1) for seq in seqs])
    mine = words[rows]
    accepted = np.where(rows >= 0, mine[:, -1], SAT_OUT)
    details = cycle_.details and each_part(lambda part: part.numpy()[rows], cycle_.details)
    return Round(mine[:, :k], Step(mine[:, k : 2 * k + 1], None, details), accepted)
