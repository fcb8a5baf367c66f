"""Heads that read the target's features, as drafters: one class for the host loop, one for the
captured cycle. Both call the same head."""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from specdec.core.types import Array, CycleChoice, Proposal, Sequence, Step
from targets.cuda.device_drafter import CapturedBatch
from targets.cuda.ops import Rows
from targets.cuda.out_of_memory import catching_oom
from targets.cuda.target import CudaTarget
from targets.cuda.verifier import sampler_needed
from targets.sampling_params import SamplingTable

NO_FEATURES = "the target was loaded without the layers that the head reads"
HEAD = "the draft head"
"""What needs the memory, in an error."""


class DraftHead(Protocol):
    """A drafter with weights. `propose` and `keep` work on device tensors and never wait for the
    host; the head's state lies on the device, by slot."""

    @property
    def target(self) -> CudaTarget: ...

    def prefill(self, seq: Sequence, start: int, stop: int, step: Step, /) -> None:
        """As `Drafter.prefill`. The step has features."""
        ...

    def propose(self, rows: Rows, needs_sampler: bool, /) -> None:
        """Fill rows.tokens [B, k + 1] behind the last tokens with guesses. needs_sampler False:
        every guess is a bare argmax."""
        ...

    def keep(
        self, rows: Rows, features: torch.Tensor, chosen: torch.Tensor, accepted: torch.Tensor, /
    ) -> None:
        """Keep for the next cycle the features [B, T, F] from which the target chose [B, T] int32,
        of which accepted [B] int32 guesses and the token after them stand."""
        ...


Head = TypeVar("Head", bound=DraftHead)


class HostHead(Generic[Head]):
    """A head as the host loop's `Drafter`."""

    def __init__(self, head: Head) -> None:
        self.head, self.target = head, head.target

    def reset(self, seq: Sequence) -> None:
        pass  # the new owner's prompt overwrites the slot before anything reads it

    @catching_oom(HEAD)
    def prefill(self, seq: Sequence, start: int, stop: int, step: Step) -> None:
        self.head.prefill(seq, start, stop, step)

    @catching_oom(HEAD)
    def propose(self, seqs: Seqs[Sequence], k: int) -> Proposal:
        return self.read(self.enqueued(seqs, k))

    def enqueued(self, seqs: Seqs[Sequence], k: int) -> Rows:
        """`propose` on the device."""
        rows = self.target.draft_rows(seqs, k)
        self.head.propose(rows, sampler_needed(seqs))
        return rows

    @catching_oom(HEAD)
    def read(self, rows: Rows) -> Proposal:
        """Wait for the guesses."""
        return Proposal(rows.tokens[:, 1:].cpu().numpy())

    @catching_oom(HEAD)
    def observe(self, seqs: Seqs[Sequence], step: Step, accepted: Array) -> None:
        assert step.features is not None, NO_FEATURES
        rows = self.target.feed(seqs, np.empty((len(seqs), 0), np.int32))
        chosen, kept = map(self._on_device, (step.chosen, accepted))
        self.head.keep(rows, step.features, chosen, kept)

    def _on_device(self, values: Array) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, np.int32)).to(self.target.device)


class DeviceHead:
    """A head as a `DeviceDrafter`. The engine's drafter stays the `HostHead`: it reads prompts."""

    def __init__(self, drafter: HostHead[Any]) -> None:
        self._head: DraftHead = drafter.head

    def ready(self, seqs: Seqs[Sequence]) -> CycleChoice:
        return CycleChoice()

    def take_back(self) -> None:
        pass

    def propose(self, batch: CapturedBatch, k: int) -> Proposal:
        self._head.propose(batch.rows, batch.needs_sampler)
        return Proposal(batch.draft)

    def observe(self, batch: CapturedBatch, step: Step, accepted: torch.Tensor) -> None:
        assert step.features is not None, NO_FEATURES
        self._head.keep(batch.rows, step.features, step.chosen, accepted.int())


def sampling_of(target: CudaTarget, greedy: bool) -> SamplingTable:
    """The requests' sampling parameters by slot, as guesses follow them. greedy: at temperature 0,
    as other engines draft (to compare)."""
    table = target.sampling_params
    return table._replace(temperature=torch.zeros_like(table.temperature)) if greedy else table
