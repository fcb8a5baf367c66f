"""An EAGLE-3 head beside the CUDA target: the host's part of drafting with it. `draft.py` has the
launches."""

from __future__ import annotations

import torch

from drafters.eagle3.cuda import draft as drafting
from drafters.eagle3.cuda.draft import Drafting
from drafters.eagle3.cuda.head import HeadModel
from drafters.eagle3.cuda.ops import Pending
from specdec.core.types import Sequence, Step
from targets.cuda.host_drafter import NO_FEATURES, sampling_of
from targets.cuda.ops import Rows


class EagleDraftHead:
    """A `DraftHead`, at most k draft tokens a cycle."""

    def __init__(self, model: HeadModel, k: int, greedy: bool = False) -> None:
        """greedy: guess the argmax at any temperature, as other engines do (to compare)."""
        self.target = model.target
        sampling_params = sampling_of(model.target, greedy)
        self.inputs = Drafting(model, _nothing(model, k + 1), sampling_params)

    def prefill(self, seq: Sequence, start: int, stop: int, step: Step) -> None:
        """Each position's features go with the token after it, which after the last position is
        the one chosen."""
        assert step.features is not None, NO_FEATURES
        # from there on nothing is guessed; before, a shorter prompt may begin alike
        if stop <= self.inputs.head.longest:
            chosen = int(step.chosen[0, 0])
            tokens = [*seq.tokens[start : stop + 1], chosen][: stop - start + 1]
            where = self.inputs, seq.slot, start, step.features
            if step.pictures:
                drafting.read_pictures(*where, tokens, step.pictures)
            else:
                drafting.read(*where, tokens[1:])

    def propose(self, rows: Rows, needs_sampler: bool) -> None:
        drafting.propose(self.inputs, rows, needs_sampler)

    def keep(
        self, rows: Rows, features: torch.Tensor, chosen: torch.Tensor, accepted: torch.Tensor
    ) -> None:
        self.inputs.head.ops.keep(self.inputs.pending, rows, features, chosen, accepted)


def _nothing(head: HeadModel, width: int) -> Pending:
    """Blank entries: not used until a prompt was read."""
    rows, device = head.target.slots + 1, head.target.device
    return Pending(
        torch.zeros((rows, width, head.spec.features), device=device),
        torch.zeros((rows, width), dtype=torch.int32, device=device),
        torch.ones(rows, dtype=torch.int32, device=device),
    )
