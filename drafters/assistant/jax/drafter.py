"""An assistant beside the JAX target: the host's part of drafting with it. `draft.py` has the
traced part."""

from __future__ import annotations

from collections.abc import Sequence as Seqs

import jax
import jax.numpy as jnp
import numpy as np

from drafters.assistant.jax import draft as drafting
from drafters.assistant.jax.draft import AssistantProgram, DraftInputs, Seed
from drafters.assistant.jax.model import place
from drafters.assistant.spec import Assistant
from specdec.core.types import CycleChoice, Sequence, Step
from targets.jax.host_drafter import sampling_of
from targets.jax.kv_view import key_norm_of
from targets.jax.params import Params
from targets.jax.placing import put, replicated, zeros
from targets.jax.target import JaxTarget


class PlacedAssistant:
    """One assistant's weights beside its target: all of its drafters share them."""

    def __init__(
        self, assistant: Assistant, target: JaxTarget, ahead: int, greedy: bool, int8: bool
    ) -> None:
        """ahead: see `AssistantProgram`. greedy: guess the argmax at any temperature, as other
        engines do (to compare). int8: round linears and head to int8."""
        spec, arch = assistant.spec, target.arch
        last = len(arch.layers) - 1
        assert target.plan.features == (last,), (target.plan.features, last)
        self.spec, self.target, self.ahead, self.greedy = spec, target, ahead, greedy
        self.int8 = int8
        ids = assistant.target_ids
        whole = replicated(target.mesh)
        self.target_ids = None if ids is None else put(ids.astype(np.int32), whole)
        self.read(assistant)

    def read(self, assistant: Assistant) -> None:
        """Take these weights, of the same spec."""
        target = self.target
        norms = tuple(
            key_norm_of(target.arch, target.params, source) for source in self.spec.sources
        )
        self.weights = place(assistant, norms, target.dtype, self.int8, target.mesh)


class AssistantDraftHead:
    """A `DraftHead`. Of a text it keeps the state of the last row alone."""

    def __init__(self, placed: PlacedAssistant) -> None:
        self.placed, self.target = placed, placed.target
        whole, slots = replicated(self.target.mesh), self.target.slots
        states = (slots, self.target.arch.hidden)
        self.memory = Seed(
            zeros(states, self.target.dtype, whole), zeros((slots,), jnp.int32, whole)
        )
        self._begin = jax.jit(drafting.begin, donate_argnums=0)

    def prefill(self, seq: Sequence, start: int, stop: int, step: Step) -> None:
        """Keep only a prompt's last row: the rest is in the target's cache."""
        assert step.features is not None, "the target was loaded without its last layer's output"
        if stop == seq.prompt_len:
            last, token = np.int32(stop - 1 - start), np.int32(step.chosen[0, 0])
            slot = np.int32(seq.slot)
            self.memory = self._begin(self.memory, slot, step.features, last, token)

    def ready(self, seqs: Seqs[Sequence]) -> CycleChoice:
        return CycleChoice()

    def program(self, needs_sampler: bool) -> AssistantProgram:
        placed, target = self.placed, self.target
        return AssistantProgram(
            spec=placed.spec,
            target=target.arch,
            ahead=placed.ahead,
            longest=target.max_len,
            needs_sampler=needs_sampler,
            block=target.plan.block,
        )

    def weights(self) -> DraftInputs:
        placed, target = self.placed, self.target
        top = target.params.top
        own = Params({name: top[name] for name in ("embed_tokens", "norm")}, ())
        sampling_params = sampling_of(target, placed.greedy)
        return DraftInputs(placed.weights, placed.target_ids, own, target.bias, sampling_params)
