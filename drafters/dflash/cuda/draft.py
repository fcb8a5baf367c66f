"""Drafting with a block drafter on device tensors: the host loop launches it, the captured cycle
captures it. `../jax/draft.py` is its JAX counterpart and explains the method."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.dflash.cuda import body
from drafters.dflash.cuda.body import PIECE
from drafters.dflash.cuda.choosing import scored, scores, spread
from drafters.dflash.cuda.model import BlockModel
from targets.cuda.cache import LayerCache
from targets.cuda.ops import Rows
from targets.sampling_params import Rules, SamplingTable


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
    fed = Rows(model.block_tokens(rows.tokens[:, 0]), rows.start.clamp(min=0), rows.slot)
    x = body.block(model.placed, inputs.caches, model.embed(fed.tokens), fed)
    x = x.view(*fed.tokens.shape, -1)[:, spec.first : spec.first + count]
    among = scored(model.placed, model.logits(x), x, target.bias, rows.slot)
    rules = Rules(target.bias, inputs.sampling_params, target.cache.tokens)
    known = None if among.ids is not None else model.known
    starts, slots = _places(rows, count, model.longest)
    for j in range(count):
        found = scores(model.placed, among, j, rows.tokens[:, j])
        found = spread(among, j, found, target.arch.vocab)
        model.guess(found, known, rules, Rows(rows.tokens, starts[j], slots[j]), j, needs_sampler)


def _places(rows: Rows, count: int, longest: int) -> tuple[Tensor, Tensor]:
    """The position that each guess follows [count, B], and the slot: -1 where no guess may lie."""
    starts = rows.start + torch.arange(count, dtype=torch.int32, device=rows.start.device)[:, None]
    return starts, torch.where(starts + 1 < longest, rows.slot, -1).int()


@torch.inference_mode()
def keep(inputs: Drafting, rows: Rows, features: Tensor) -> None:
    """Write the entries of features [B, T, F]: those of the text's last token and of all guesses
    behind it, whether they stand or not."""
    fed = Rows(_tokens(features), rows.start.clamp(min=0), rows.slot)
    body.inject(inputs.model.placed, inputs.caches, features, fed)


@torch.inference_mode()
def read(inputs: Drafting, slot: int, start: int, features: Tensor) -> None:
    """A chunk of a prompt: features [1, T, F] from position `start` on."""
    where = torch.full((1,), slot, dtype=torch.int32, device=features.device)
    for at in range(0, features.shape[1], PIECE):
        part = features[:, at : at + PIECE]
        fed = Rows(_tokens(part), torch.full_like(where, start + at), where)
        body.inject(inputs.model.placed, inputs.caches, part, fed)


def _tokens(features: Tensor) -> Tensor:
    """[B, T] for features [B, T, F]: what is stored depends on their number alone."""
    return torch.empty(features.shape[:2], dtype=torch.int32, device=features.device)
