"""Drafting with a block drafter, as traced functions on slots: the host loop compiles one of them
alone, the device loop within its cycle.

Entry p of a layer's cache is made of the target's features at p alone, in `observe`, which has
what was accepted: no rejected row ever enters, and nothing of a block is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from drafters.dflash.jax import body
from drafters.dflash.jax.body import Caches, Weights
from drafters.dflash.jax.choosing import scored, scores
from drafters.dflash.spec import BlockSpec
from specdec.core.types import NO_GUESS, Array, Proposal, Step
from targets.jax.device_drafter import SlotState, TracedDrafter
from targets.jax.guessing import guess
from targets.sampling_params import Rules, SamplingTable


@struct.dataclass
class DraftInputs:
    """What drafting only reads."""

    weights: Weights
    target_ids: Array | None
    """[D] int32: the target's id of each draft id; None where they are the same."""
    table: Array
    """Embeddings: the target's, or the head's own."""
    head: Any
    """What makes logits, likewise."""
    bias: Array
    sampling_params: SamplingTable
    """The target's sampling parameters by slot."""


@dataclass(frozen=True)
class BlockProgram:
    """What of a head is compiled in."""

    spec: BlockSpec
    longest: int
    """No token from this position on is guessed: the target's context ends there."""
    needs_sampler: bool
    """False: every guess is a bare argmax."""

    def on(self, weights: DraftInputs, memory: Caches) -> TracedDrafter:
        return _TracedBlock(self, weights, memory)


class _TracedBlock:
    def __init__(self, static: BlockProgram, inputs: DraftInputs, memory: Caches) -> None:
        self.static, self.inputs, self.memory = static, inputs, memory

    def propose(self, batch: SlotState, k: int) -> Proposal:
        return Proposal(propose(self.static, self.inputs, self.memory, batch, k))

    def observe(self, batch: SlotState, step: Step, accepted: Array) -> None:
        """Rows 0 .. accepted: the text's last token and the guesses that stand."""
        assert step.features is not None, "the target was made without the head's layers"
        offset = jnp.arange(step.features.shape[1])
        stands = (offset <= accepted[:, None]) & batch.live[:, None]
        positions = jnp.where(stands, batch.length[:, None] - 1 + offset, -1)
        rows = jnp.arange(len(batch.length))
        self.memory = write(self.static, self.inputs, self.memory, step.features, rows, positions)


def write(
    static: BlockProgram,
    inputs: DraftInputs,
    memory: Caches,
    features: Array,
    rows: Array,
    positions: Array,
) -> Caches:
    """Features [B, T, F] at positions [B, T] of slots rows [B], negative ones nowhere; nor those
    beyond the last draft."""
    kept = jnp.where(positions < static.longest, positions, -1)
    return body.inject(inputs.weights, static.spec, memory, features, rows, kept)


def read(
    static: BlockProgram,
    inputs: DraftInputs,
    memory: Caches,
    slot: Array,
    features: Array,
    start: Array,
    count: Array,
) -> Caches:
    """One slot's prefill chunk: features [1, T, F] from position `start` on, `count` real ones."""
    offset = jnp.arange(features.shape[1])[None]
    positions = jnp.where(offset < count, start + offset, -1)
    return write(static, inputs, memory, features, slot[None], positions)


def propose(
    static: BlockProgram, inputs: DraftInputs, memory: Caches, batch: SlotState, k: int
) -> Array:
    """The whole block in one pass, then up to k guesses, left to right: [B, k], NO_GUESS behind
    what a block drafts."""
    spec, rows = static.spec, len(batch.length)
    draft = jnp.full((rows, k), NO_GUESS, jnp.int32)
    count = min(k, spec.drafts)
    if count == 0:
        return draft
    start = batch.length - 1
    anchor = jnp.take_along_axis(batch.cache.tokens, start[:, None], 1)[:, 0]
    embedded = body.embed(spec, inputs.table, anchor)
    hidden = body.block(inputs.weights, spec, memory, embedded, start)
    hidden = hidden[:, spec.first : spec.first + count]
    logits = body.logits(spec, inputs.head, hidden)
    among = scored(spec, logits, inputs.target_ids, hidden, inputs.bias)

    def step(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        history, previous, draft = carry
        place = batch.length + j
        found, ids = scores(inputs.weights, spec, among, j, previous)
        going = batch.live & (place < static.longest)
        rules = Rules(inputs.bias, inputs.sampling_params, history)
        chosen = guess(found, ids, rules, place, going, static.needs_sampler)
        history = history.at[jnp.arange(rows), place].set(chosen, mode="drop")
        return history, chosen, draft.at[:, j].set(chosen)

    return jax.lax.fori_loop(0, count, step, (batch.cache.tokens, anchor, draft))[2]
