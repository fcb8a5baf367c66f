"""Drafting with an EAGLE-3 head, as traced functions on slots: the host loop compiles one of them
alone, the device loop within its cycle.

Entry p of the draft cache is made of the target's features at p and the token x[p + 1], and
predicts x[p + 2]. Drafting writes entries of the head's own output. The next cycle begins by
writing those of the accepted tokens again, from the target's features (held in `Pending`), so the
cache equals that of a fresh prefill. Entries beyond are rejected: the length is the rollback.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import struct

from drafters.eagle3.jax import head
from drafters.eagle3.jax.head import DraftCache, Weights
from drafters.eagle3.spec import HeadSpec
from specdec.core.types import NO_GUESS, Array, Proposal, Step
from targets.jax.device_drafter import SlotState, TracedDrafter
from targets.jax.guessing import guess
from targets.jax.model import Merged
from targets.sampling_params import Rules, SamplingTable


@struct.dataclass
class Pending:
    """The last cycle's choices, by slot: the next one begins by reading them."""

    features: Array
    """[B, W, F]: the target's states."""
    chosen: Array
    """[B, W] int32: the tokens that were chosen from them."""
    count: Array
    """[B] int32: how many are real; the last of those ends the text."""


@struct.dataclass
class DraftState:
    """What drafting reads and writes."""

    cache: DraftCache
    pending: Pending


@struct.dataclass
class DraftInputs:
    """What drafting only reads."""

    head: Weights
    target_ids: Array
    """[V] int32: the target's id of each draft id."""
    table: Array
    """The target's embedding."""
    bias: Array
    sampling_params: SamplingTable
    """The target's sampling parameters by slot."""


@struct.dataclass
class Texts:
    """The slots' texts."""

    history: Array
    """[B, S] int32, of which the first `length` are real, but for the last of them."""
    length: Array
    live: Array


@dataclass(frozen=True)
class HeadProgram:
    """What of a head is compiled in."""

    spec: HeadSpec
    longest: int
    """No token from this position on is guessed: the target's context or the head's ends there."""
    needs_sampler: bool
    """False: every guess is a bare argmax."""

    def on(self, weights: DraftInputs, memory: DraftState) -> TracedDrafter:
        return _TracedHead(self, weights, memory)


class _TracedHead:
    def __init__(self, static: HeadProgram, inputs: DraftInputs, memory: DraftState) -> None:
        self.static, self.inputs, self.memory = static, inputs, memory

    def propose(self, batch: SlotState, k: int) -> Proposal:
        texts = Texts(batch.cache.tokens, batch.length, batch.live)
        self.memory, draft = propose(self.static, self.inputs, self.memory, texts, k)
        return Proposal(draft)

    def observe(self, batch: SlotState, step: Step, accepted: Array) -> None:
        assert step.features is not None, "the target was made without the head's layers"
        new = Pending(step.features, step.chosen, accepted.astype(jnp.int32) + 1)
        pending = learn(self.memory.pending, new, batch.live)
        self.memory = replace(self.memory, pending=pending)


def learn(old: Pending, new: Pending, live: Array) -> Pending:
    """`old` with the new choices of live rows [B]. A cycle with fewer guesses fills only the first
    places; `new.features` may be wider than `chosen`."""
    width = new.chosen.shape[1]

    def first(new: Array, old: Array) -> Array:
        live_rows = live.reshape(-1, *[1] * (new.ndim - 1))
        return old.at[:, :width].set(jnp.where(live_rows, new[:, :width], old[:, :width]))

    return Pending(
        first(new.features, old.features),
        first(new.chosen, old.chosen),
        jnp.where(live, new.count, old.count),
    )


def propose(
    static: HeadProgram, inputs: DraftInputs, memory: DraftState, texts: Texts, k: int
) -> tuple[DraftState, Array]:
    """The accepted tokens' entries from the target's features, then a guess at a time: [B, k]."""
    draft = jnp.full((texts.length.shape[0], k), NO_GUESS, jnp.int32)
    if k == 0:
        return memory, draft
    row, pending = jnp.arange(texts.length.shape[0]), memory.pending
    last = pending.chosen[row, pending.count - 1]
    history = texts.history.at[row, texts.length - 1].set(last)
    cache, out = _catch_up(static, inputs, memory, texts)
    draft = draft.at[:, 0].set(_choose(static, inputs, out, replace(texts, history=history), 0))

    def step(j: Array, carry: tuple) -> tuple:
        cache, out, history, draft = carry
        token, place = draft[:, j - 1], texts.length + j - 1
        history = history.at[row, place].set(token)
        position = jnp.where(texts.live, place - 1, -1)[:, None]
        embedded = head.embed(inputs.table, token)[:, None].astype(out.dtype)
        hidden = head.feedback(inputs.head, static.spec, out)[:, None]
        cache, out = head.decode(inputs.head, static.spec, cache, embedded, hidden, position)
        chosen = _choose(static, inputs, out[:, 0], replace(texts, history=history), j)
        return cache, out[:, 0], history, draft.at[:, j].set(chosen)

    cache, _, _, draft = jax.lax.fori_loop(1, k, step, (cache, out, history, draft))
    return replace(memory, cache=cache), draft


def _catch_up(
    static: HeadProgram, inputs: DraftInputs, memory: DraftState, texts: Texts
) -> tuple[DraftCache, Array]:
    """Write what is pending -> (cache, the head's output [B, H] after the last committed token)."""
    pending = memory.pending
    chosen, count = pending.chosen, pending.count
    offset = jnp.arange(chosen.shape[1])
    real = (offset < count[:, None]) & texts.live[:, None]
    positions = jnp.where(real, (texts.length - 1 - count)[:, None] + offset, -1)
    cache, out = _extend(static, inputs, memory.cache, chosen, pending.features, positions)
    return cache, out[jnp.arange(len(count)), count - 1]


def read(
    static: HeadProgram,
    inputs: DraftInputs,
    memory: DraftState,
    slot: Array,
    features: Array,
    tokens: Array,
    start: Array,
    count: Array,
    merged: Merged | None = None,
) -> DraftState:
    """One slot's prefill chunk: features [1, T, F] from position `start` on, and the tokens [1, T]
    that follow each; the first `count` are real. The last is pending too, to draft from. merged:
    rows of pictures in place of those tokens' embeddings."""
    row = jax.tree.map(lambda leaf: leaf[slot][None], memory.cache)
    offset = jnp.arange(tokens.shape[1])[None]
    positions = jnp.where(offset < count, start + offset, -1)
    row, _ = _extend(static, inputs, row, tokens, features, positions, merged)
    cache = jax.tree.map(lambda all_, one: all_.at[slot].set(one[0]), memory.cache, row)
    old = memory.pending
    pending = Pending(
        old.features.at[slot, 0].set(features[0, count - 1].astype(old.features.dtype)),
        old.chosen.at[slot, 0].set(tokens[0, count - 1]),
        old.count.at[slot].set(1),
    )
    return DraftState(cache, pending)


def read_pictures(
    static: HeadProgram,
    inputs: DraftInputs,
    memory: DraftState,
    slot: Array,
    features: Array,
    tokens: Array,
    start: Array,
    count: Array,
    merged: Merged,
) -> DraftState:
    """`read` of a chunk [1, T] with pictures, and of the entry before it: where the chunk begins
    with a picture, that entry could not be made before. Its features are pending. tokens and merged
    [1, T + 1]: from the chunk's own first one on; `count` are real."""
    before = memory.pending.features[slot, :1][None].astype(features.dtype)
    features = jnp.concatenate([before, features], 1)
    return read(static, inputs, memory, slot, features, tokens, start - 1, count, merged)


def _extend(
    static: HeadProgram,
    inputs: DraftInputs,
    cache: DraftCache,
    tokens: Array,
    features: Array,
    positions: Array,
    merged: Merged | None = None,
) -> tuple[DraftCache, Array]:
    """Entries of tokens [B, T] that were chosen from features [B, T, F]."""
    hidden = head.fuse(inputs.head, static.spec, features)
    embedded = head.embed(inputs.table, tokens).astype(hidden.dtype)
    if merged is not None:  # as the target has them: a norm follows, which undoes any scale
        embedded = jnp.where(merged.there[..., None], merged.rows.astype(hidden.dtype), embedded)
    return head.decode(inputs.head, static.spec, cache, embedded, hidden, positions)


def _choose(
    static: HeadProgram, inputs: DraftInputs, out: Array, texts: Texts, j: Array | int
) -> Array:
    """The head's output [B, H] -> guess j of each text [B], as the target would choose: by its
    rules, and with its noise. NO_GUESS where a row is idle, or all of the head's words are
    barred."""
    logits, place = head.logits(inputs.head, static.spec, out), texts.length + j
    going = texts.live & (place < static.longest)
    rules = Rules(inputs.bias, inputs.sampling_params, texts.history)
    return guess(logits, inputs.target_ids, rules, place, going, static.needs_sampler)
