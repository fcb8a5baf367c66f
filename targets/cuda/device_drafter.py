"""The captured cycle's drafters: methods on device tensors that never wait for the host.

A drafter's folder brings a `DeviceDrafter` for this target, with whatever weights and caches it
needs.
"""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from dataclasses import dataclass
from typing import Protocol

import torch

from specdec.core.protocols import Proposer
from specdec.core.types import CycleChoice, Sequence
from targets.cuda.ops import Rows


@dataclass(frozen=True)
class SlotState:
    """Each slot's place in time, int32 on the device. Written by the captured cycle."""

    length: torch.Tensor
    """[slots]: tokens so far, the last one not yet fed."""
    live: torch.Tensor
    """[slots]: whether the row goes on."""
    stops: torch.Tensor
    """[slots, STOPS]: its stop ids. Written by the host."""
    limit: torch.Tensor
    """[slots]: the length at which it ends. Written by the host."""
    most: torch.Tensor
    """[slots]: the most guesses that its request allows. Written by the host."""


@dataclass(frozen=True)
class CapturedBatch:
    """The batch of a captured cycle: the verify's rows before a drafter has written guesses."""

    rows: Rows
    """tokens [B, k + 1]: each row's last token, then NO_GUESS, which drafters overwrite."""
    needs_sampler: bool
    """Whether any row's choice is more than an argmax."""
    logprobs: bool

    @property
    def draft(self) -> torch.Tensor:
        """[B, k]: where the guesses go."""
        return self.rows.tokens[:, 1:]


class DeviceDrafter(Proposer[CapturedBatch], Protocol):
    """`propose` and `observe` are captured. A `propose` that writes into the batch's `draft`, and
    returns that, saves a copy."""

    def ready(self, seqs: Seqs[Sequence]) -> CycleChoice:
        """The host's work for these rows before a cycle, and how that cycle runs."""
        ...

    def take_back(self) -> None:
        """The cycle of the last `ready` is not launched."""
        ...
