"""Drafting with an assistant, as traced functions on slots: the host loop compiles one of them
alone, the device loop within its cycle.

All guesses of a cycle are made at one place: with the keys and values up to the last settled
position, and one rotation. What passes from step to step is a state. Nothing is written but the
guesses, so nothing has to be rolled back, and a prompt need not be read.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct

from drafters.assistant.jax.model import Weights, score, step
from drafters.assistant.spec import AssistantSpec
from specdec.core.types import NO_GUESS, Array, Proposal, Step
from targets.arch import Arch
from targets.jax.cache import Cache
from targets.jax.device_drafter import SlotState, TracedDrafter
from targets.jax.guessing import guess
from targets.jax.kv_view import KVView, entries_of
from targets.jax.layers import rms_norm
from targets.jax.model import embed
from targets.jax.params import Params
from targets.sampling_params import Rules, SamplingTable


@struct.dataclass
class Seed:
    """What the next cycle drafts from, by slot: the end of the text as the target left it."""

    state: Array
    """[B, H]: the target's last layer's output at the position before the last token, from which
    that token was chosen; not normed yet."""
    token: Array
    """[B] int32: the last token."""


@struct.dataclass
class DraftInputs:
    """What drafting only reads."""

    weights: Weights
    target_ids: Array | None
    """[D] int32: the words that a pruned head scores; None for a whole one."""
    top: Params
    """The target's embedding and final norm."""
    bias: Array
    sampling_params: SamplingTable
    """The target's sampling parameters by slot."""


@dataclass(frozen=True)
class AssistantProgram:
    """What of an assistant is compiled in."""

    spec: AssistantSpec
    target: Arch
    ahead: int
    """How far behind the last key the queries are turned: 1 as transformers does, 0 as vLLM."""
    longest: int
    """No token from this position on is guessed: the target's context ends there."""
    needs_sampler: bool
    """False: every guess is a bare argmax."""
    block: int
    """As in `CacheExchange`."""

    def on(self, weights: DraftInputs, memory: Seed) -> TracedDrafter:
        return _TracedAssistant(self, weights, memory)


class _TracedAssistant:
    def __init__(self, static: AssistantProgram, inputs: DraftInputs, memory: Seed) -> None:
        self.static, self.inputs, self.memory = static, inputs, memory

    def propose(self, batch: SlotState, k: int) -> Proposal:
        return Proposal(
            propose(self.static, self.inputs, self.memory, batch.cache, batch.length, batch.live, k)
        )

    def observe(self, batch: SlotState, step: Step, accepted: Array) -> None:
        assert step.features is not None, "the target was made without its last layer's output"
        self.memory = learn(self.memory, step.features, step.chosen, accepted, batch.live)


def learn(seed: Seed, features: Array, chosen: Array, accepted: Array, live: Array) -> Seed:
    """Live rows go on from the token chosen [B, W] after their accepted [B] guesses, and the state
    of features [B, W or more, H] that it was chosen from."""
    row = jnp.arange(len(accepted))
    return Seed(
        jnp.where(live[:, None], features[row, accepted], seed.state),
        jnp.where(live, chosen[row, accepted], seed.token),
    )


def begin(seed: Seed, slot: Array, features: Array, last: Array, token: Array) -> Seed:
    """After a slot's prompt was read. features [1, T, H]: of its last chunk; `token` was chosen
    from row `last` of it."""
    return Seed(
        seed.state.at[slot].set(features[0, last].astype(seed.state.dtype)),
        seed.token.at[slot].set(token),
    )


def propose(
    static: AssistantProgram,
    inputs: DraftInputs,
    seed: Seed,
    cache: Cache,
    length: Array,
    live: Array,
    k: int,
) -> Array:
    """k guesses for texts of length [B], the last token of each yet to be fed: [B, k] int32,
    NO_GUESS for rows that are not live [B] and beyond the context's end."""
    spec, row = static.spec, jnp.arange(length.shape[0])
    draft = jnp.full((length.shape[0], k), NO_GUESS, jnp.int32)
    if k == 0:
        return draft
    view = KVView(jnp.maximum(length - 2, 0), static.ahead, static.block)
    donors = tuple(entries_of(static.target, cache, source) for source in spec.sources)
    state = rms_norm(seed.state, inputs.top.top["norm"], static.target.eps)
    history = cache.tokens.at[row, length - 1].set(seed.token)

    def body(j: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        token, state, history, draft = carry
        embedded = embed(inputs.top, static.target, jnp.maximum(token, 0)).astype(state.dtype)
        fed = embedded[:, None], state[:, None]
        y, handed = step(inputs.weights, spec, view, donors, static.ahead, *fed)
        scores, place = score(inputs.weights, spec, inputs.target_ids, y[:, 0]), length + j
        rules = Rules(inputs.bias, inputs.sampling_params, history)
        going = live & (place < static.longest)
        token = guess(scores.logits, scores.ids, rules, place, going, static.needs_sampler)
        history = history.at[row, place].set(token, mode="drop")
        return token, handed[:, 0], history, draft.at[:, j].set(token)

    return jax.lax.fori_loop(0, k, body, (seed.token, state, history, draft))[-1]
