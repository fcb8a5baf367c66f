"""What guided rows add to a captured cycle: tokens that come first in a draft, and masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from specdec.core.constraint import mask_words, put_forced_first
from specdec.core.protocols import Proposer
from specdec.core.types import NO_GUESS, Proposal, Step
from targets.cuda.device_drafter import CapturedBatch


@dataclass(frozen=True)
class Guides:
    """The guides of one graph: tensors that it reads."""

    forced_prefix: torch.Tensor
    """[B, k] int32: tokens that come first in the draft, NO_GUESS behind them."""
    masks: torch.Tensor
    """[B, k + 1, words] int32: what each position may hold."""
    host_forced_prefix: torch.Tensor
    host_masks: torch.Tensor
    """The same, page-locked."""
    host_draft: torch.Tensor
    """[B, k] int32, page-locked: what was drafted."""

    @classmethod
    def blank(cls, batch: int, k: int, vocab: int, device: torch.device) -> Guides:
        shape = batch, k + 1, mask_words(vocab)
        masks = torch.full(shape, -1, dtype=torch.int32, pin_memory=True)
        forced_prefix, draft = (
            torch.full((batch, k), NO_GUESS, dtype=torch.int32, pin_memory=True) for _ in range(2)
        )
        return cls(forced_prefix.to(device), masks.to(device), forced_prefix, masks, draft)

    def put_first(self, forced_prefix: np.ndarray | None) -> None:
        """Put those tokens [at most B, k] in place; None: there are none."""
        known = self.host_forced_prefix.numpy()
        if forced_prefix is None and (known == NO_GUESS).all():
            return
        known[:] = NO_GUESS
        if forced_prefix is not None:
            known[: len(forced_prefix)] = forced_prefix
        self.forced_prefix.copy_(self.host_forced_prefix, non_blocking=True)


class ForcedPrefixDrafter:
    """`Proposer` of the captured cycle: tokens that need no drafter come first."""

    def __init__(
        self,
        drafter: Proposer[CapturedBatch],
        forced_prefix: torch.Tensor,
        cut: Callable[[], None],
    ) -> None:
        self._drafter, self._forced_prefix, self._cut = drafter, forced_prefix, cut

    def propose(self, batch: CapturedBatch, k: int) -> Proposal:
        own = self._drafter.propose(batch, k)
        batch.draft.copy_(put_forced_first(self._forced_prefix, own.tokens))
        self._cut()
        return replace(own, tokens=batch.draft)

    def observe(self, batch: CapturedBatch, step: Step, accepted: torch.Tensor) -> None:
        self._drafter.observe(batch, step, accepted)
