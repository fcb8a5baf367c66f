"""The EAGLE-3 drafter of the CUDA target: for the host loop a `Drafter`, for the captured cycle a
`DeviceDrafter`. Both run `draft.py`; here is what the host has to do."""

from __future__ import annotations

from collections.abc import Sequence as Seqs

import numpy as np
import torch
from torch import Tensor

from drafters.eagle3.cuda import draft as drafting
from drafters.eagle3.cuda.draft import Drafting
from drafters.eagle3.cuda.head import HeadModel
from drafters.eagle3.cuda.ops import Pending
from specdec.core.types import Array, Sequence, Step
from targets.cuda.device_drafter import CapturedBatch


class EagleDrafter:
    """One head beside its target; at most k draft tokens a cycle."""

    def __init__(self, head: HeadModel, k: int, greedy: bool = False) -> None:
        """greedy: guess the argmax at any temperature, as other engines do (to compare)."""
        sampling_params = head.target.sampling_params
        if greedy:
            sampling_params = sampling_params._replace(
                temperature=torch.zeros_like(sampling_params.temperature)
            )
        self.target, self.given = (
            head.target,
            Drafting(head, _nothing(head, k + 1), sampling_params),
        )

    def reset(self, seq: Sequence) -> None:
        pass  # the new owner's entries overwrite the old one's before anything sees them

    def observe(self, seqs: Seqs[Sequence], step: Step, accepted: Array) -> None:
        assert step.features is not None, "the target was made without the head's layers"
        rows = self.target.feed(seqs, np.empty((len(seqs), 0), np.int32))
        told = (np.asarray(part, np.int32) for part in (step.chosen, accepted))
        chosen, kept = (torch.from_numpy(part).to(self.target.device) for part in told)
        self.given.head.ops.keep(self.given.pending, rows, step.features, chosen, kept)

    def prefill(self, seq: Sequence, start: int, stop: int, step: Step) -> None:
        """Each position's features go with the token after it, which after the last position is
        the one chosen."""
        assert step.features is not None, "the target was made without the head's layers"
        # from there on nothing is guessed; before, a shorter prompt may begin alike
        if stop <= self.given.head.longest:
            chosen = int(step.chosen[0, 0])
            tokens = [*seq.tokens[start + 1 : stop + 1], chosen][: stop - start]
            drafting.read(self.given, seq.slot, start, step.features, tokens)

    def propose(self, seqs: Seqs[Sequence], k: int) -> Array:
        rows = self.target.draft_rows(seqs, k)
        drafting.propose(self.given, rows, any(seq.sampling.needs_sampler for seq in seqs))
        return rows.tokens[:, 1:].cpu().numpy()


class DeviceEagle:
    """A `DeviceDrafter`. The host's drafter stays the engine's: it reads the prompts."""

    def __init__(self, drafter: EagleDrafter) -> None:
        self.given = drafter.given

    def ready(self, seqs: Seqs[Sequence]) -> None:
        pass

    def propose(self, batch: CapturedBatch, k: int) -> Tensor:
        drafting.propose(self.given, batch.rows, batch.needs_sampler)
        return batch.draft

    def observe(self, batch: CapturedBatch, step: Step, accepted: Tensor) -> None:
        assert step.features is not None, "the target was made without the head's layers"
        ops, pending = self.given.head.ops, self.given.pending
        ops.keep(pending, batch.rows, step.features, step.chosen, accepted.int())


def _nothing(head: HeadModel, width: int) -> Pending:
    """Of no use until a prompt was read."""
    rows, device = head.target.slots + 1, head.target.device
    return Pending(
        torch.zeros((rows, width, head.spec.features), device=device),
        torch.zeros((rows, width), dtype=torch.int32, device=device),
        torch.ones(rows, dtype=torch.int32, device=device),
    )
