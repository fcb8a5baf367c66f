"""Drafting with a block drafter on device tensors: the host loop launches it, the captured cycle
captures it. `../jax/draft.py` is its JAX counterpart and explains the method."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.dflash.cuda import body
from drafters.dflash.cuda.body import LayerCache
from drafters.dflash.cuda.choosing import scored, scores, spread
from drafters.dflash.cuda.model import BlockModel
from targets.cuda.ops import Rows
from targets.sampling_params import Rules, SamplingTable

PIECE = 128
"""Rows of a prompt that are written at once: what its sums take stays small."""


@dataclass(frozen=True)
class Drafting:
    """caches: by layer. sampling_params: the requests', as guesses are to follow them."""

    model: BlockModel
    caches: tuple[LayerCache, ...]
    sampling_params: SamplingTable


@torch.inference_mode()
def propose(inputs: Drafting, rows: Rows, needs_sampler: bool) -> None:
    """Fill rows.tokens [B, k + 1] behind the last tokens with guesses, as many as a block drafts:
    one pass, then left to right. needs_sampler False: every guess is a bare argmax."""
    model, spec, target = inputs.model, inputs.model.spec, inputs.model.target
    count = min(rows.tokens.shape[1] - 1, spec.drafts)
    if count == 0:
        return
    start = rows.start.clamp(min=0)
    embedded = model.embed(rows.tokens[:, 0].contiguous())
    x = body.block(model.placed, inputs.caches, embedded, rows.slot, start)
    x = x[:, spec.first : spec.first + count]
    bias = target.bias[rows.slot.clamp(min=0).long()]
    among = scored(model.placed, model.logits(x), body.normed(model.placed, x), bias)
    rules = Rules(target.bias, inputs.sampling_params, target.cache.tokens)
    for j in range(count):
        found = scores(model.placed, among, j, rows.tokens[:, j])
        found = spread(among, j, found, target.arch.vocab)
        known = None if among.ids is not None else model.known
        before = rows.start + j
        slots = torch.where(before + 1 < model.longest, rows.slot, -1)
        at = Rows(rows.tokens, before, slots.int())
        model.guess(found, known, rules, at, j, needs_sampler)


@torch.inference_mode()
def keep(inputs: Drafting, rows: Rows, features: Tensor, accepted: Tensor) -> None:
    """Write the entries of features [B, T, F]: rows 0 .. accepted [B], the text's last token and
    the guesses that stand."""
    offset = torch.arange(features.shape[1], device=features.device)
    positions = rows.start[:, None].long() + offset
    stands = (offset <= accepted[:, None]) & (positions < inputs.model.longest)
    places = torch.where(stands & (rows.slot >= 0)[:, None], positions, -1)
    body.inject(inputs.model.placed, inputs.caches, features, rows.slot, places)


@torch.inference_mode()
def read(inputs: Drafting, slot: int, start: int, features: Tensor) -> None:
    """A chunk of a prompt: features [1, T, F] from position `start` on."""
    device = features.device
    where = torch.tensor([slot], device=device)
    for at in range(0, features.shape[1], PIECE):
        part = features[:, at : at + PIECE]
        positions = start + at + torch.arange(part.shape[1], device=device)
        body.inject(inputs.model.placed, inputs.caches, part, where, positions[None])
