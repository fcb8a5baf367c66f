"""How a block's drafts are chosen, left to right, in torch: `../jax/choosing.py` has the method.

Shape legend: B rows, K drafts, H hidden, D draft vocabulary, C candidates, R rank, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.dflash.cuda.body import Placed, normed
from drafters.dflash.spec import PreviousToken, Selector


class Scored(NamedTuple):
    """What drafts are chosen from. logits [B, K, D]; of a selector [B, K, C] of the candidates ids
    [B, K, C], and hidden [B, K, H], the slots' states after the final norm."""

    logits: Tensor
    ids: Tensor | None = None
    hidden: Tensor | None = None


def scored(placed: Placed, logits: Tensor, x: Tensor, biases: Tensor, slot: Tensor) -> Scored:
    """x [B, K, H]: the slots' states before the final norm. biases [S, V]: the requests', by slot
    [B]; a word that its row's bars is no candidate."""
    chooser = placed.spec.chooser
    if not isinstance(chooser, Selector):
        return Scored(logits)
    bias = biases[slot.clamp(min=0).long(), None, : logits.shape[-1]]
    ids = (logits + bias).topk(chooser.candidates, -1).indices
    return Scored(logits.gather(-1, ids), ids, normed(placed, x))


def scores(placed: Placed, among: Scored, j: int, previous: Tensor) -> Tensor:
    """Scores [B, D or C] float32 of draft j behind the tokens previous [B]."""
    spec, w, own = placed.spec, placed.weights, among.logits[:, j]
    if spec.chooser is None:
        return own
    before = previous.clamp(0, spec.vocab - 1).long()
    if isinstance(spec.chooser, PreviousToken):
        rows = w["markov_head.markov_w1"][before]
        return own + F.linear(rows, w["markov_head.markov_w2"]).float()
    assert among.ids is not None and among.hidden is not None, "a selector scores candidates"
    state = F.linear(among.hidden[:, j].to(placed.dtype), w["candidate_selector.hidden_projection"])
    context = w["candidate_selector.predecessor_codebook"][before] * state
    successors = w["candidate_selector.successor_codebook"][among.ids[:, j]]
    return own + (successors @ context[..., None])[..., 0].float()


def spread(among: Scored, j: int, found: Tensor, vocab: int) -> Tensor:
    """Scores of candidates as logits [B, V] of all words, -inf for the others; scores of a
    vocabulary as they are."""
    if among.ids is None:
        return found.contiguous()
    whole = torch.full((len(found), vocab), -torch.inf, device=found.device)
    return whole.scatter_(1, among.ids[:, j], found)


def confidence(placed: Placed, hidden: Tensor, previous: Tensor) -> Tensor:
    """The chance that each draft is accepted, before the sigmoid [B, K], of states hidden [B, K, H]
    behind the tokens previous [B, K]; for heads that predict it."""
    chooser, w = placed.spec.chooser, placed.weights
    assert isinstance(chooser, PreviousToken) and chooser.confidence, chooser
    read = [hidden.to(placed.dtype)]
    if chooser.confidence_reads_token:
        read.append(w["markov_head.markov_w1"][previous.long()])
    found = F.linear(torch.cat(read, -1), w["confidence_head.proj"])[..., 0]
    return found.float() + w["confidence_head.proj.bias"]
