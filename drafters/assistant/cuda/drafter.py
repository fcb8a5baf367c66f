"""An assistant beside the CUDA target: the host's part of drafting with it. `draft.py` has the
launches."""

from __future__ import annotations

import torch

from drafters.assistant.cuda import draft as drafting
from drafters.assistant.cuda.draft import Drafting
from drafters.assistant.cuda.model import AssistantModel
from specdec.core.types import Sequence, Step
from targets.cuda.host_drafter import NO_FEATURES, sampling_of
from targets.cuda.ops import Rows


class AssistantDraftHead:
    """A `DraftHead`. Of a text that is read it keeps the state of the last row alone."""

    def __init__(self, model: AssistantModel, greedy: bool = False) -> None:
        """greedy: guess the argmax at any temperature, as other engines do (to compare)."""
        self.target = target = model.target
        states = torch.zeros((target.slots + 1, target.arch.hidden), device=target.device)
        self.inputs = Drafting(model, states, sampling_of(target, greedy))

    @torch.inference_mode()
    def prefill(self, seq: Sequence, start: int, stop: int, step: Step) -> None:
        assert step.features is not None, NO_FEATURES
        if stop == seq.fed:
            self.inputs.states[seq.slot] = step.features[0, stop - 1 - start]

    def propose(self, rows: Rows, needs_sampler: bool) -> None:
        drafting.propose(self.inputs, rows, needs_sampler)

    def keep(
        self, rows: Rows, features: torch.Tensor, chosen: torch.Tensor, accepted: torch.Tensor
    ) -> None:
        self.inputs.model.ops.keep(self.inputs.states, rows, features, accepted)
