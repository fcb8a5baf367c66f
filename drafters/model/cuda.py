"""The model drafter in the captured cycle: `host.py`, step for step, on the device."""

from __future__ import annotations

from collections.abc import Sequence as Seqs

import torch
from torch import Tensor

from drafters.model.host import CATCH_UP, ModelDrafter
from specdec.core.types import NO_GUESS, CycleChoice, Proposal, Sequence, Step
from targets.cuda.device_drafter import CapturedBatch
from targets.cuda.ops import Rows
from targets.cuda.target import CudaTarget


class DeviceModel:
    """A `DeviceDrafter`. The host's drafter stays the engine's: it reads the prompts."""

    def __init__(self, drafter: ModelDrafter, target: CudaTarget) -> None:
        assert isinstance(drafter.model, CudaTarget), "the cycle captures its forward"
        self.drafter, self.model, self.target = drafter, drafter.model, target
        self.model.share_pool(target)

    def ready(self, seqs: Seqs[Sequence]) -> CycleChoice:
        self.drafter.finish_prompts(seqs)
        return CycleChoice()

    def take_back(self) -> None:
        pass

    def propose(self, batch: CapturedBatch, k: int) -> Proposal:
        """The last two committed tokens first, then a guess at a time."""
        rows = batch.rows
        tokens = _last_two(self.target, rows)
        for j in range(k):
            # a token at position max_len could never be emitted
            going = (rows.start + (j + 1) < self.model.max_len) & (rows.slot >= 0)
            start = rows.start + (j + 1 - tokens.shape[1])
            feed = Rows(tokens, start, torch.where(going, rows.slot, -1))
            chosen = self.model.forward(feed, batch.needs_sampler).chosen[:, -1]
            guess = torch.where(going, chosen, NO_GUESS)
            rows.tokens[:, j + 1] = guess
            tokens = guess[:, None]
        return Proposal(batch.draft)

    def observe(self, batch: CapturedBatch, step: Step, accepted: Tensor) -> None:
        pass  # what was rejected lies beyond the length, and is overwritten


def _last_two(target: CudaTarget, rows: Rows) -> Tensor:
    """[B, CATCH_UP] int32; idle rows get anything."""
    slot, last = rows.slot.clamp(min=0).long(), rows.start.clamp(min=CATCH_UP - 1).long()
    before = target.cache.tokens[slot, last - (CATCH_UP - 1)]
    return torch.stack([before, rows.tokens[:, 0]], 1)
