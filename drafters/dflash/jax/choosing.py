"""How a block's drafts are chosen, left to right: each by the target's rules and noise, from the
slot's logits alone (DFlash), with a bias by the token before (DSpark), or among the slot's best few
words by a score with the token before (DFlash 2).

Shape legend: B rows, K drafts, H hidden, D draft vocabulary, C candidates, R rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from drafters.dflash.jax.body import Weights
from drafters.dflash.spec import BlockSpec, PreviousToken, Selector
from specdec.core.types import Array
from targets.jax.layers import project


class Scored(NamedTuple):
    """What drafts are chosen from. logits [B, K, D], or [B, K, C] of candidates; ids of the
    target's [D], or [B, K, C], None for its whole vocabulary; hidden [B, K, H]: slots' states."""

    logits: Array
    ids: Array | None
    hidden: Array


def scored(spec: BlockSpec, logits: Array, ids: Array | None, hidden: Array, bias: Array) -> Scored:
    """bias [B, V]: the requests'; a word that it bars is no candidate."""
    chooser = spec.chooser
    if not isinstance(chooser, Selector):
        return Scored(logits, ids, hidden)
    _, best = jax.lax.top_k(logits + bias[:, None, : logits.shape[-1]], chooser.candidates)
    return Scored(jnp.take_along_axis(logits, best, -1), best.astype(jnp.int32), hidden)


def scores(
    weights: Weights, spec: BlockSpec, among: Scored, j: Any, previous: Array
) -> tuple[Array, Array | None]:
    """(scores [B, D or C] float32 of draft j behind the tokens previous [B], the ids of these
    words)."""
    own = among.logits[:, j]
    if spec.chooser is None:
        return own, among.ids
    before = jnp.clip(previous, 0, spec.vocab - 1)
    if isinstance(spec.chooser, PreviousToken):
        rows = weights["markov_head.markov_w1"][before]
        return own + _wide(rows, weights["markov_head.markov_w2"]), among.ids
    assert among.ids is not None, "a selector scores candidates"
    ids = among.ids[:, j]
    state = project(among.hidden[:, j], weights["candidate_selector.hidden_projection"])
    context = weights["candidate_selector.predecessor_codebook"][before] * state
    successors = weights["candidate_selector.successor_codebook"][ids]
    products = jnp.einsum("br,bcr->bc", context, successors, preferred_element_type=jnp.float32)
    return own + products, ids


def confidence(weights: Weights, spec: BlockSpec, hidden: Array, previous: Array) -> Array:
    """The chance that each draft is accepted, before the sigmoid [B, K], of states hidden [B, K, H]
    behind the tokens previous [B, K]; for heads that predict it."""
    chooser = spec.chooser
    assert isinstance(chooser, PreviousToken) and chooser.confidence, chooser
    read = [hidden]
    if chooser.confidence_reads_token:
        read.append(weights["markov_head.markov_w1"][previous])
    found = _wide(jnp.concatenate(read, -1), weights["confidence_head.proj"])[..., 0]
    return found + weights["confidence_head.proj.bias"].astype(jnp.float32)


def _wide(x: Array, weight: Array) -> Array:
    return jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=jnp.float32)
