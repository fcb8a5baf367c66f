"""What a drafter is to the captured cycle: methods on device tensors that never wait for the host.

A drafter's folder brings a `DeviceDrafter` for this target, with whatever weights and caches it
needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seqs
from dataclasses import dataclass
from typing import Protocol

import torch

from specdec.core.protocols import Proposer
from specdec.core.types import Sequence
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
    """[slots]: how many guesses its request wants at most. Written by the host."""


@dataclass(frozen=True)
class CapturedBatch:
    """The batch of a captured cycle: the verify as it is laid out before anybody drafts."""

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
    """All but `ready` is captured. A `propose` that writes into `batch.draft`, and returns that,
    saves a copy."""

    def ready(self, seqs: Seqs[Sequence]) -> None:
        """What the host has to do for these rows before a cycle."""
        ...


def variant_of(drafter: DeviceDrafter) -> str:
    """Which of its cycles is captured, or replayed, now. Most drafters have but one; one that has
    more says which in `variant`, once `ready` was called."""
    return getattr(drafter, "variant", "")


def names_of(drafter: DeviceDrafter) -> Mapping[int, str]:
    """The drafters that one is made of, by number; most are made of none."""
    return getattr(drafter, "names", {})


def by_of(drafter: DeviceDrafter) -> torch.Tensor | None:
    """[B] int32: the number of the drafter that made each row's guesses, where one is made of some
    and there are guesses."""
    return getattr(drafter, "by", None)


def take_back(drafter: DeviceDrafter) -> None:
    """The cycle that `ready` was called for does not come: told to drafters that ask in
    `take_back`."""
    getattr(drafter, "take_back", lambda: None)()
