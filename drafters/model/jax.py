"""The model drafter inside the traced loop: `host.py`, step for step, on traced state."""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct

from drafters.model.host import CATCH_UP, ModelDrafter
from specdec.core.types import NO_GUESS, Array, CycleChoice, Proposal, Sequence, Step
from targets.jax import programs
from targets.jax.cache import Cache
from targets.jax.device_drafter import SlotState, TracedDrafter, TracedProgram
from targets.jax.params import Params
from targets.jax.programs import Feed, Plan
from targets.jax.target import JaxTarget
from targets.sampling_params import Rules, SamplingTable


@struct.dataclass
class ModelInputs:
    """Read-only inputs of drafting: the draft model's weights, and the requests' sampling
    parameters by slot."""

    params: Params
    bias: Array
    sampling_params: SamplingTable


class DeviceModel:
    """A `DeviceDrafter`. The host's drafter stays the engine's: it reads the prompts."""

    def __init__(self, drafter: ModelDrafter) -> None:
        assert isinstance(drafter.model, JaxTarget), "the loop traces its forward"
        self.drafter, self.model = drafter, drafter.model

    @property
    def memory(self) -> Cache:
        return self.model.cache

    @memory.setter
    def memory(self, cache: Cache) -> None:
        self.model.cache = cache

    def ready(self, seqs: Seqs[Sequence]) -> CycleChoice:
        self.drafter.finish_prompts(seqs)
        return CycleChoice()

    def program(self, needs_sampler: bool) -> TracedProgram:
        return ModelProgram(self.model.plan, needs_sampler)

    def weights(self) -> ModelInputs:
        return ModelInputs(self.model.params, self.model.bias, self.model.sampling_params())


@dataclass(frozen=True)
class ModelProgram:
    """needs_sampler False: every guess is a bare argmax."""

    plan: Plan
    needs_sampler: bool

    def on(self, weights: ModelInputs, memory: Cache) -> TracedDrafter:
        return _TracedModel(self, weights, memory)


class _TracedModel:
    def __init__(self, static: ModelProgram, weights: ModelInputs, memory: Cache) -> None:
        self.static, self.weights, self.memory = static, weights, memory

    def propose(self, batch: SlotState, k: int) -> Proposal:
        """The last two committed tokens first, then a guess at a time."""
        draft = jnp.full((batch.length.shape[0], k), NO_GUESS, jnp.int32)
        if k == 0:
            return Proposal(draft)
        place = batch.length[:, None] - CATCH_UP + jnp.arange(CATCH_UP)
        last = jnp.take_along_axis(batch.cache.tokens, place, 1)
        memory, chosen = self._feed(self.memory, last, batch.length - CATCH_UP, batch.live)
        draft = draft.at[:, 0].set(chosen[:, CATCH_UP - 1])

        def step(j: Array, carry: tuple[Cache, Array]) -> tuple[Cache, Array]:
            memory, draft = carry
            guess = jax.lax.dynamic_slice_in_dim(draft, j - 1, 1, 1)
            memory, chosen = self._feed(memory, guess, batch.length + j - 1, batch.live)
            return memory, draft.at[:, j].set(chosen[:, 0])

        self.memory, draft = jax.lax.fori_loop(1, k, step, (memory, draft))
        return Proposal(draft)

    def observe(self, batch: SlotState, step: Step, accepted: Array) -> None:
        pass  # what was rejected lies beyond the length, and is overwritten

    def _feed(self, memory: Cache, tokens: Array, start: Array, live: Array) -> tuple[Cache, Array]:
        """tokens [B, T] at start [B] -> the cache, and what is chosen after each [B, width].

        A row at the end of the context sits out: its guess is NO_GUESS.
        """
        static, weights = self.static, self.weights
        plan, count = static.plan, tokens.shape[1]
        going = live & (start + count < plan.max_len)
        padding = jnp.full((plan.slots, plan.width - count), NO_GUESS, jnp.int32)
        feed = Feed(jnp.concatenate([tokens, padding], 1), start, jnp.where(going, count, 0))
        memory, out = programs.verify(plan, weights.params, memory, feed)
        rules = Rules(weights.bias, weights.sampling_params, memory.tokens)
        chosen = programs.choose(plan, static.needs_sampler, out.logits, rules, feed)
        return memory, jnp.where(going[:, None], chosen, NO_GUESS)
