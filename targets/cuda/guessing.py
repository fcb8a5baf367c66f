"""A drafter's guess out of its own logits, as the target would choose: by the request's rules, and
with the target's noise at the guess's position. `Sampler.guess` launches it, and
`targets/jax/guessing.py` is its twin.

Shape legend: B rows, D words that the drafter scores, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.core.types import NO_GUESS
from targets.cuda.ops import Ops, Rows
from targets.sampling_params import Rules

LIKELIEST = 128
"""Words from which a guess is drawn where a request has top-p alone: what is less likely is seldom
guessed right, and a cut by mass of all words takes as long as a draft."""


class DraftVocabulary(NamedTuple):
    """ids [D] int32: the target's, ascending; draft_ids [V] int32: the inverse, -1 for the rest."""

    ids: Tensor
    draft_ids: Tensor


def vocabulary_of(ids: Tensor, vocab: int, device: torch.device) -> DraftVocabulary:
    """ids [D], ascending, on the host."""
    inverse = torch.full((vocab,), -1)
    inverse[ids] = torch.arange(len(ids))
    return DraftVocabulary(ids.int().to(device), inverse.int().to(device))


Guess = Callable[[Tensor, DraftVocabulary | None, Rules, Rows, int, bool], None]
"""Choose guess j from logits [B, D] of these words (None: all) by `Ops.choose`'s rules and noise;
NO_GUESS where every scored word is barred, or the slot is -1. Takes (logits, words, rules, at, j,
needs_sampler). The guess is written to at.tokens[:, j + 1], and to its place in the history, which
the next guess's penalties read. at: the verify's tokens, and the position before the guess."""


def _among_the_likeliest(rules: Rules) -> Rules:
    """The rules for guesses: top-k is LIKELIEST for rows that have top-p alone."""
    table = rules.sampling_params
    alone = (table.top_k <= 0) & (table.top_p < 1)
    top_k = torch.where(alone, LIKELIEST, table.top_k)
    return rules._replace(sampling_params=table._replace(top_k=top_k))


def reference_guess(
    ops: Ops,
    logits: Tensor,
    known: DraftVocabulary | None,
    rules: Rules,
    at: Rows,
    j: int,
    needs_sampler: bool,
) -> None:
    """`Guess` in torch, by `ops.choose`."""
    spread, rules = logits[:, None], _among_the_likeliest(rules)
    if known is not None:
        spread = logits.new_full((len(logits), 1, rules.bias.shape[1]), -torch.inf)
        spread[:, 0, known.ids.long()] = logits
    fed = Rows(at.tokens[:, :1], at.start, at.slot)
    chosen = ops.choose(spread, rules, fed, needs_sampler)[:, 0]
    slot, live, word = at.slot.clamp(min=0).long(), at.slot >= 0, chosen.long()
    best = spread[:, 0].gather(1, word[:, None])[:, 0] + rules.bias[slot, word]
    guesses = torch.where(live & (best > -torch.inf), chosen, NO_GUESS)
    at.tokens[:, j + 1] = guesses
    rules.history[slot[live], at.start[live].long() + 1] = guesses[live]
