"""What guided rows add to a captured cycle: tokens that come first in a draft, and masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from specdec.core.constraint import lead, mask_words
from specdec.core.protocols import Proposer
from specdec.core.types import NO_GUESS, Proposal, Step
from targets.cuda.device_drafter import CapturedBatch


@dataclass(frozen=True)
class Guides:
    """The guides of one graph: tensors that it reads."""

    leading: torch.Tensor
    """[B, k] int32: tokens that come first in the draft, NO_GUESS behind them."""
    masks: torch.Tensor
    """[B, k + 1, words] int32: what each position may hold."""
    host_leading: torch.Tensor
    host_masks: torch.Tensor
    """The same, page-locked."""
    host_draft: torch.Tensor
    """[B, k] int32, page-locked: what was drafted."""

    @classmethod
    def blank(cls, batch: int, k: int, vocab: int, device: torch.device) -> Guides:
        shape = batch, k + 1, mask_words(vocab)
        masks = torch.full(shape, -1, dtype=torch.int32, pin_memory=True)
        leading, draft = (
            torch.full((batch, k), NO_GUESS, dtype=torch.int32, pin_memory=True) for _ in range(2)
        )
        return cls(leading.to(device), masks.to(device), leading, masks, draft)

    def put_first(self, leading: np.ndarray | None) -> None:
        """Put those tokens [at most B, k] in place; None: there are none."""
        known = self.host_leading.numpy()
        if leading is None and (known == NO_GUESS).all():
            return
        known[:] = NO_GUESS
        if leading is not None:
            known[: len(leading)] = leading
        self.leading.copy_(self.host_leading, non_blocking=True)


class LedDrafter:
    """`Proposer` of the captured cycle: tokens that need no drafter come first."""

    def __init__(
        self,
        drafter: Proposer[CapturedBatch],
        leading: torch.Tensor,
        cut: Callable[[], None],
    ) -> None:
        self._drafter, self._leading, self._cut = drafter, leading, cut

    def propose(self, batch: CapturedBatch, k: int) -> Proposal:
        own = self._drafter.propose(batch, k)
        batch.draft.copy_(lead(self._leading, own.tokens))
        self._cut()
        return replace(own, tokens=batch.draft)

    def observe(self, batch: CapturedBatch, step: Step, accepted: torch.Tensor) -> None:
        self._drafter.observe(batch, step, accepted)
