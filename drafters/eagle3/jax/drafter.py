"""The EAGLE-3 drafter of the JAX target: for the host loop a `Drafter`, for the device loop a
`DeviceDrafter` as well. Both run `draft.py`; here is what the host has to do."""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from drafters.eagle3.jax import draft as drafting
from drafters.eagle3.jax.draft import DraftInputs, DraftState, HeadProgram, Pending, Texts
from drafters.eagle3.jax.head import make_cache, place
from drafters.eagle3.spec import Head, check_pair
from specdec.core.types import Array, Sequence, Step
from targets.jax.placing import put, replicated, zeros
from targets.jax.programs import bind
from targets.jax.target import JaxTarget

_learn = jax.jit(drafting.learn)


class EagleDrafter:
    """One head beside its target; at most k draft tokens a cycle."""

    def __init__(self, head: Head, target: JaxTarget, k: int, greedy: bool = False) -> None:
        """greedy: guess the argmax at any temperature, as other engines do (to compare).

        Raises UserError for a head of another target.
        """
        check_pair(head.spec, target.arch)
        assert target.plan.features == head.spec.layers, (target.plan.features, head.spec.layers)
        self.spec, self.target, self.greedy, self.k = head.spec, target, greedy, k
        self.head, self.target_ids = place(head, target.dtype, target.mesh)
        self.longest = min(target.max_len, head.spec.max_position)
        self.memory = self._blank()
        self._read = jax.jit(bind(drafting.read, self.program(False)), donate_argnums=1)
        self._propose = {
            needs_sampler: jax.jit(
                bind(drafting.propose, self.program(needs_sampler)),
                static_argnums=3,
                donate_argnums=1,
                out_shardings=(None, replicated(target.mesh)),
            )
            for needs_sampler in (False, True)
        }

    def _blank(self) -> DraftState:
        slots, width, mesh = self.target.slots, self.k + 1, self.target.mesh
        dtype, whole = self.target.dtype, replicated(mesh)
        pending = Pending(
            zeros((slots, width, self.spec.features), dtype, whole),
            zeros((slots, width), jnp.int32, whole),
            put(np.ones(slots, np.int32), whole),
        )
        return DraftState(make_cache(self.spec, slots, self.longest, dtype, mesh), pending)

    def reset(self, seq: Sequence) -> None:
        pass  # the new owner's entries overwrite the old one's before anything sees them

    def observe(self, seqs: Seqs[Sequence], step: Step, accepted: Array) -> None:
        assert step.features is not None and step.by_slot, "as the JAX target hands them out"
        rows, slots = [seq.slot for seq in seqs], self.target.slots
        chosen = np.zeros((slots, step.chosen.shape[1]), np.int32)
        count, live = np.ones(slots, np.int32), np.zeros(slots, bool)
        chosen[rows], count[rows], live[rows] = step.chosen, np.asarray(accepted) + 1, True
        new = Pending(step.features, chosen, count)
        pending = _learn(self.memory.pending, new, live)
        self.memory = replace(self.memory, pending=pending)

    def prefill(self, seq: Sequence, start: int, stop: int, step: Step) -> None:
        """Each position's features go with the token after it, which after the last position is
        the one chosen."""
        assert step.features is not None, "the target was made without the head's layers"
        chosen, count = int(step.chosen[0, 0]), stop - start
        following = [*seq.tokens[start + 1 : stop + 1], chosen][:count]
        self.read(seq.slot, step.features, following, start)

    def read(self, slot: int, features: Array, following: list[int], start: int) -> None:
        """Make the entries from position `start` on, of features [1, T, F] and the token that
        follows each; rows beyond those are padding."""
        tokens = np.zeros((1, features.shape[1]), np.int32)
        count = len(following)
        tokens[0, :count] = following
        where = np.int32(slot), features, tokens, np.int32(start), np.int32(count)
        self.memory = self._read(self.weights(), self.memory, *where)

    def propose(self, seqs: Seqs[Sequence], k: int) -> Array:
        """[B, k], one dispatch."""
        slots = np.array([seq.slot for seq in seqs])
        length, live = np.ones(self.target.slots, np.int32), np.zeros(self.target.slots, bool)
        length[slots], live[slots] = [len(seq.tokens) for seq in seqs], True
        texts = Texts(self.target.cache.tokens, length, live)
        program = self._propose[any(seq.sampling.needs_sampler for seq in seqs)]
        self.memory, draft = program(self.weights(), self.memory, texts, k)
        return np.asarray(draft)[slots]

    def ready(self, seqs: Seqs[Sequence]) -> None:
        pass

    def program(self, needs_sampler: bool) -> HeadProgram:
        return HeadProgram(self.spec, self.longest, needs_sampler)

    def weights(self) -> DraftInputs:
        sampling_params, top = self.target.sampling_params(), self.target.params.top
        if self.greedy:
            sampling_params = sampling_params._replace(
                temperature=jnp.zeros_like(sampling_params.temperature)
            )
        return DraftInputs(
            self.head, self.target_ids, top["embed_tokens"], self.target.bias, sampling_params
        )
