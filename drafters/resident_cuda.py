"""What a drafter is to the captured cycle: methods on device tensors that never wait for the host.

`Lookup` is the simple kind, a pure function of the text. Others (`model_cuda`, `eagle3/`) bring
weights and caches of their own.
"""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from typing import NamedTuple, Protocol

import torch

from specdec.types import Sequence, Step
from targets.cuda.kernels import Kernels
from targets.cuda.ops import Rows
from targets.cuda.target import CudaTarget


class State(NamedTuple):
    """Per slot, int32 on the device: tokens so far (the last one not yet fed), whether the row
    goes on, its stop ids [slots, STOPS] and the length at which it ends; cycles [1] counts."""

    length: torch.Tensor
    live: torch.Tensor
    stops: torch.Tensor
    limit: torch.Tensor
    cycles: torch.Tensor


class Resident(Protocol):
    """All but `ready` is captured."""

    def ready(self, seqs: Seqs[Sequence]) -> None:
        """What the host has to do for these rows before a cycle."""
        ...

    def propose(self, state: State, slots: torch.Tensor, k: int, shaped: bool) -> Rows:
        """The verify of these slots [B] (-1: padding): tokens [B, k + 1] are each row's last one
        and its guesses, NO_GUESS allowed. shaped: whether any choice is more than an argmax."""
        ...

    def observe(self, rows: Rows, step: Step, accepted: torch.Tensor) -> None:
        """As `specdec.protocols.Drafter` says; rows: what `propose` laid out."""
        ...


class Lookup:
    """Prompt lookup in the slots' own texts, or nothing: then it only lays out the verify."""

    def __init__(self, target: CudaTarget, lengths: tuple[int, int] | None) -> None:
        """lengths: the shortest and the longest suffix to look up; None: no guesses."""
        assert isinstance(target.ops, Kernels), "references ask the host: they can't be captured"
        self.target, self.choosing, self.lengths = target, target.ops.choosing, lengths or (1, 0)

    def ready(self, seqs: Seqs[Sequence]) -> None:
        pass

    def propose(self, state: State, slots: torch.Tensor, k: int, shaped: bool) -> Rows:
        history, places = self.target.cache.tokens, (state.length, state.live)
        return self.choosing.draft(history, places, slots, k, self.lengths)

    def observe(self, rows: Rows, step: Step, accepted: torch.Tensor) -> None:
        pass  # `propose` reads the texts, there is nothing else to learn
