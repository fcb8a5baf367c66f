"""The assistant as a drafter of the CUDA target: for the host loop a `Drafter`, for the captured
cycle a `DeviceDrafter`. Both run `draft.py`; here is what the host has to do."""

from __future__ import annotations

from collections.abc import Sequence as Seqs

import numpy as np
import torch
from torch import Tensor

from drafters.assistant.cuda import draft as drafting
from drafters.assistant.cuda.draft import Drafting
from drafters.assistant.cuda.model import AssistantModel
from specdec.core.types import Array, Sequence, Step
from targets.cuda.device_drafter import CapturedBatch


class AssistantDrafter:
    """Nothing of a prompt is kept but the state of its last row."""

    def __init__(self, model: AssistantModel, greedy: bool = False) -> None:
        """greedy: guess the argmax at any temperature, as other engines do (to compare)."""
        self.target = target = model.target
        sampling_params = target.sampling_params
        if greedy:
            sampling_params = sampling_params._replace(
                temperature=torch.zeros_like(sampling_params.temperature)
            )
        states = torch.zeros((target.slots + 1, target.arch.hidden), device=target.device)
        self.given = Drafting(model, states, sampling_params)

    def reset(self, seq: Sequence) -> None:
        pass  # its prompt's last row says what to draft from before anybody asks

    @torch.inference_mode()
    def prefill(self, seq: Sequence, start: int, stop: int, step: Step) -> None:
        assert step.features is not None, "the target was made without its last layer's output"
        if stop == seq.prompt_len:
            self.given.states[seq.slot] = step.features[0, stop - 1 - start]

    def observe(self, seqs: Seqs[Sequence], step: Step, accepted: Array) -> None:
        assert step.features is not None, "the target was made without its last layer's output"
        rows = self.target.feed(seqs, np.empty((len(seqs), 0), np.int32))
        kept = torch.from_numpy(np.asarray(accepted, np.int32)).to(self.target.device)
        self.given.model.ops.keep(self.given.states, rows, step.features, kept)

    def propose(self, seqs: Seqs[Sequence], k: int) -> Array:
        rows = self.target.draft_rows(seqs, k)
        drafting.propose(self.given, rows, any(seq.sampling.needs_sampler for seq in seqs))
        return rows.tokens[:, 1:].cpu().numpy()


class DeviceAssistant:
    """A `DeviceDrafter`. The host's drafter stays the engine's: it reads the prompts."""

    def __init__(self, drafter: AssistantDrafter) -> None:
        self.given = drafter.given

    def ready(self, seqs: Seqs[Sequence]) -> None:
        pass

    def propose(self, batch: CapturedBatch, k: int) -> Tensor:
        drafting.propose(self.given, batch.rows, batch.needs_sampler)
        return batch.draft

    def observe(self, batch: CapturedBatch, step: Step, accepted: Tensor) -> None:
        assert step.features is not None, "the target was made without its last layer's output"
        model, states = self.given.model, self.given.states
        model.ops.keep(states, batch.rows, step.features, accepted.int())
