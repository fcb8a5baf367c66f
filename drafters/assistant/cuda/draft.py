"""Drafting with an assistant on device tensors: the host loop launches it, the captured cycle
captures it. `../jax/draft.py` is its JAX counterpart and explains the method."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.assistant.cuda.model import AssistantModel
from drafters.assistant.cuda.ops import States
from targets.cuda.ops import Rows
from targets.sampling_params import Rules, SamplingTable


@dataclass(frozen=True)
class Drafting:
    """states [S + 1, H]: by slot, the output of the target's last layer from which its last token
    was chosen, before the norm. sampling_params: the requests', which guesses follow too."""

    model: AssistantModel
    states: Tensor
    sampling_params: SamplingTable


@torch.inference_mode()
def propose(inputs: Drafting, rows: Rows, needs_sampler: bool) -> None:
    """Fill rows.tokens [B, k + 1] behind the last tokens with guesses. needs_sampler False: every
    guess is a bare argmax."""
    model, k = inputs.model, rows.tokens.shape[1] - 1
    if k == 0:
        return
    target, ops = model.target, model.ops
    layout = ops.prepare_rows(rows, k, target.max_len)
    rules = Rules(target.bias, inputs.sampling_params, target.cache.tokens)
    states = States(inputs.states, rows.slot, target.weights.norm)
    for j in range(k):
        seen = Rows(rows.tokens[:, j : j + 1], layout.seen, layout.slots[j])
        logits, x = model.step(rows.tokens[:, j], states, seen)
        at = Rows(rows.tokens, layout.starts[j], layout.slots[j])
        ops.guess(logits, model.known, rules, at, j, needs_sampler)
        if j + 1 < k:
            states = States(model.handed(x))
