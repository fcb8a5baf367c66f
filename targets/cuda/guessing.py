"""A drafter's guess out of its own logits, as the target would choose: by the request's rules, and
with the target's noise at the guess's position. `targets/jax/guessing.py` is its twin.

Shape legend: B rows, D words that the drafter scores, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Structure, c_int, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.core.types import NO_GUESS
from targets.cuda.launch import Launcher, Variant, address, pointer
from targets.cuda.ops import Ops, Rows
from targets.cuda.sampler import CLUSTER, Sampler
from targets.sampling_params import Rules, SamplingTable

GUESS = Variant("guess")
THREADS = 256
MOST_DRAFTS = 48 * 1024
"""Words that fit into a cluster's registers (guess.cu); among more, the target's own sampler
chooses."""
LIKELIEST = 128
"""Of more words than that, those from which a guess is drawn where a request has top-p alone: what
is less likely is seldom guessed right, and a cut by mass of all words takes as long as a draft."""


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
"""Guess j from logits [B, D] of these words (None: all) by `Ops.choose`'s rules and noise; NO_GUESS
where nothing that is scored may be said, or the slot is -1. Takes (logits, words, rules, at, j,
needs_sampler). The guess goes to at.tokens[:, j + 1], and to its place in the history, where the
next one's penalties look. at: the verify's tokens, and the position that the guess follows."""


class _Guess(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("logits", "ids", "draft_ids", "bias", "history")),
        *(
            (name, c_void_p)
            for name in ("start", "slot", *SamplingTable._fields, "counts", "tokens")
        ),
        *((name, c_int) for name in ("drafts", "vocab", "stride", "width", "j", "shaped")),
    )


class Guesser:
    """`Guess` as launches of our kernels. sampler: chooses among many words."""

    def __init__(self, launch: Launcher, sampler: Sampler, device: torch.device) -> None:
        self._launch, self._sampler, self._device = launch, sampler, device

    def __call__(
        self,
        logits: Tensor,
        known: DraftVocabulary | None,
        rules: Rules,
        at: Rows,
        j: int,
        needs_sampler: bool,
    ) -> None:
        (batch, drafts), vocab = logits.shape, rules.bias.shape[1]
        if known is None or drafts > MOST_DRAFTS:
            spread = logits[:, None] if known is None else self._spread(logits, known.draft_ids)
            self._sampler.guess(spread, rules, at, j, needs_sampler, LIKELIEST)
            return
        size = (batch, drafts) if needs_sampler else 0
        counts = torch.empty(size, dtype=torch.int32, device=self._device)
        job = _Guess(
            *map(address, (logits, *known, rules.bias, rules.history, at.start, at.slot)),
            *map(address, (*rules.sampling_params, counts, at.tokens)),
            *(drafts, vocab, rules.history.stride(0), at.tokens.shape[1], j, int(needs_sampler)),
        )
        self._launch(GUESS, "guess", (batch * CLUSTER, 1, 1), THREADS, [job])

    def _spread(self, logits: Tensor, draft_ids: Tensor) -> Tensor:
        """[B, D] over draft ids -> [B, 1, V], -inf for what is not scored."""
        batch, vocab = len(logits), len(draft_ids)
        out = torch.empty((batch, 1, vocab), device=self._device)
        arguments = [*map(pointer, (logits, draft_ids, out))]
        arguments += [c_int(logits.shape[1]), c_int(vocab)]
        self._launch(GUESS, "spread", (-(-vocab // THREADS), batch, 1), THREADS, arguments)
        return out


def _among_the_likeliest(rules: Rules) -> Rules:
    """As a guess is drawn from many words: of LIKELIEST, where top-p alone cuts."""
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
    """`Guess` in torch. ops: whose `choose` chooses."""
    spread = logits[:, None]
    if known is None or logits.shape[1] > MOST_DRAFTS:
        rules = _among_the_likeliest(rules)
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
