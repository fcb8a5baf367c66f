"""The assistant as a drafter of the JAX target: for the host loop a `Drafter`, for the device loop
a `DeviceDrafter` as well. Both run `draft.py`; here is what the host has to do."""

from __future__ import annotations

from collections.abc import Sequence as Seqs

import jax
import jax.numpy as jnp
import numpy as np

from drafters.assistant.jax import draft as drafting
from drafters.assistant.jax.draft import AssistantProgram, DraftInputs, Seed
from drafters.assistant.jax.model import place
from drafters.assistant.spec import Assistant
from specdec.core.types import Array, Sequence, Step
from targets.jax.kv_view import key_norm_of
from targets.jax.params import Params
from targets.jax.placing import put, replicated, zeros
from targets.jax.programs import bind
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


class AssistantDrafter:
    """Nothing of a text is kept but the state of its last row."""

    def __init__(self, placed: PlacedAssistant) -> None:
        self.placed, self.target = placed, placed.target
        whole, slots = replicated(self.target.mesh), self.target.slots
        states = (slots, self.target.arch.hidden)
        self.memory = Seed(
            zeros(states, self.target.dtype, whole), zeros((slots,), jnp.int32, whole)
        )
        self._begin = jax.jit(drafting.begin, donate_argnums=0)
        self._learn = jax.jit(drafting.learn, donate_argnums=0)
        self._propose = {
            needs_sampler: jax.jit(
                bind(drafting.propose, self.program(needs_sampler)),
                static_argnums=5,
                out_shardings=whole,
            )
            for needs_sampler in (False, True)
        }

    def reset(self, seq: Sequence) -> None:
        pass  # its prompt's last row says what to draft from before anybody asks

    def prefill(self, seq: Sequence, start: int, stop: int, step: Step) -> None:
        """Of a prompt, its last row alone: all else of it is in the target's cache."""
        assert step.features is not None, "the target was made without its last layer's output"
        if stop == seq.prompt_len:
            last, token = np.int32(stop - 1 - start), np.int32(step.chosen[0, 0])
            slot = np.int32(seq.slot)
            self.memory = self._begin(self.memory, slot, step.features, last, token)

    def observe(self, seqs: Seqs[Sequence], step: Step, accepted: Array) -> None:
        assert step.features is not None and step.by_slot, "as the JAX target hands them out"
        rows, slots = [seq.slot for seq in seqs], self.target.slots
        chosen = np.zeros((slots, step.chosen.shape[1]), np.int32)
        kept, live = np.zeros(slots, np.int32), np.zeros(slots, bool)
        chosen[rows], kept[rows], live[rows] = step.chosen, accepted, True
        self.memory = self._learn(self.memory, step.features, chosen, kept, live)

    def propose(self, seqs: Seqs[Sequence], k: int) -> Array:
        """[B, k], one dispatch."""
        slots = np.array([seq.slot for seq in seqs])
        length, live = np.full(self.target.slots, 2, np.int32), np.zeros(self.target.slots, bool)
        length[slots], live[slots] = [len(seq.tokens) for seq in seqs], True
        program = self._propose[any(seq.sampling.needs_sampler for seq in seqs)]
        draft = program(self.weights(), self.memory, self.target.cache, length, live, k)
        return np.asarray(draft)[slots]

    def ready(self, seqs: Seqs[Sequence]) -> None:
        pass

    def program(self, needs_sampler: bool) -> AssistantProgram:
        placed, target = self.placed, self.target
        return AssistantProgram(
            placed.spec, target.arch, placed.ahead, target.max_len, needs_sampler
        )

    def weights(self) -> DraftInputs:
        placed, target = self.placed, self.target
        sampling_params, top = target.sampling_params(), target.params.top
        if placed.greedy:
            sampling_params = sampling_params._replace(
                temperature=jnp.zeros_like(sampling_params.temperature)
            )
        own = Params({name: top[name] for name in ("embed_tokens", "norm")}, ())
        return DraftInputs(placed.weights, placed.target_ids, own, target.bias, sampling_params)
