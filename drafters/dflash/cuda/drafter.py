"""A block drafter beside the CUDA target: the host's part of drafting with it. `draft.py` has the
launches."""

from __future__ import annotations

import torch

from drafters.dflash.cuda import draft as drafting
from drafters.dflash.cuda.body import make_caches
from drafters.dflash.cuda.draft import Drafting
from drafters.dflash.cuda.model import BlockModel
from specdec.core.types import Sequence, Step
from targets.cuda.host_drafter import NO_FEATURES, sampling_of
from targets.cuda.ops import Rows


class BlockDraftHead:
    """A `DraftHead`. Its memory is the keys and values of the accepted tokens, by slot."""

    def __init__(self, model: BlockModel, greedy: bool = False) -> None:
        """greedy: guess the argmax at any temperature, as other engines do (to compare)."""
        self.target = target = model.target
        caches = make_caches(model.placed, target.slots, model.longest)
        self.inputs = Drafting(model, caches, sampling_of(target, greedy))

    def prefill(self, seq: Sequence, start: int, stop: int, step: Step) -> None:
        """Each position's entry is made of its features alone."""
        assert step.features is not None, NO_FEATURES
        drafting.read(self.inputs, seq.slot, start, step.features[:, : stop - start])

    def propose(self, rows: Rows, needs_sampler: bool) -> None:
        drafting.propose(self.inputs, rows, needs_sampler)

    def keep(
        self, rows: Rows, features: torch.Tensor, chosen: torch.Tensor, accepted: torch.Tensor
    ) -> None:
        drafting.keep(self.inputs, rows, features)
