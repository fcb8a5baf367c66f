"""An EAGLE-3 head beside the JAX target: the host's part of drafting with it. `draft.py` has the
traced part."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seqs

import jax
import jax.numpy as jnp
import numpy as np

from drafters.eagle3.jax import draft as drafting
from drafters.eagle3.jax.draft import DraftInputs, DraftState, HeadProgram, Pending
from drafters.eagle3.jax.head import entries, make_cache, place
from drafters.eagle3.spec import Head, check_pair
from specdec.core.types import Array, CycleChoice, Sequence, Step
from targets.jax.cache import TILE
from targets.jax.host_drafter import sampling_of
from targets.jax.placing import put, replicated, zeros
from targets.jax.programs import bind
from targets.jax.target import JaxTarget, merge


class EagleDraftHead:
    """A `DraftHead`, at most k draft tokens a cycle."""

    def __init__(self, head: Head, target: JaxTarget, k: int, greedy: bool = False) -> None:
        """greedy: guess the argmax at any temperature, as other engines do (to compare).

        Raises UserError for a head of another target.
        """
        check_pair(head.spec, target.arch)
        assert target.plan.features == head.spec.layers, (target.plan.features, head.spec.layers)
        self.spec, self.target, self.greedy, self.k = head.spec, target, greedy, k
        self.placed, self.target_ids = place(head, target.dtype, target.mesh)
        self.longest = min(target.max_len, head.spec.max_position)
        self.memory = self._blank()
        program = self.program(False)
        self._read = jax.jit(bind(drafting.read, program), donate_argnums=1)
        self._read_pictures = jax.jit(bind(drafting.read_pictures, program), donate_argnums=1)

    def _blank(self) -> DraftState:
        slots, width, mesh = self.target.slots, self.k + 1, self.target.mesh
        dtype, whole = self.target.dtype, replicated(mesh)
        pending = Pending(
            zeros((slots, width, self.spec.features), dtype, whole),
            zeros((slots, width), jnp.int32, whole),
            put(np.ones(slots, np.int32), whole),
        )
        plan = self.target.plan
        # a snapshot's chunk fits too, with the rest of a picture that lies across its end
        slack = max(width, math.lcm(plan.chunk, TILE) + plan.pictures)
        size = entries(self.spec, self.longest, slack)
        return DraftState(make_cache(self.spec, slots, size, dtype, mesh), pending)

    def prefill(self, seq: Sequence, start: int, stop: int, step: Step) -> None:
        """Each position's features go with the token after it, which after the last position is
        the one chosen."""
        assert step.features is not None, "the target was loaded without the head's layers"
        chosen, count = int(step.chosen[0, 0]), stop - start
        tokens = [*seq.tokens[start : stop + 1], chosen][: count + 1]
        if not step.pictures:
            self.read(seq.slot, step.features, tokens[1:], start)
            return
        padded = np.zeros((1, step.features.shape[1] + 1), np.int32)
        padded[0, : count + 1] = tokens
        merged = merge(step.pictures, (padded.shape[1], self.spec.hidden), self.target.dtype)
        where = np.int32(seq.slot), step.features, padded, np.int32(start), np.int32(count + 1)
        self.memory = self._read_pictures(self.weights(), self.memory, *where, merged)

    def read(self, slot: int, features: Array, following: list[int], start: int) -> None:
        """Make the entries from position `start` on, of features [1, T, F] and the token that
        follows each; rows beyond those are padding."""
        tokens = np.zeros((1, features.shape[1]), np.int32)
        count = len(following)
        tokens[0, :count] = following
        where = np.int32(slot), features, tokens, np.int32(start), np.int32(count)
        self.memory = self._read(self.weights(), self.memory, *where)

    def ready(self, seqs: Seqs[Sequence]) -> CycleChoice:
        return CycleChoice()

    def program(self, needs_sampler: bool) -> HeadProgram:
        return HeadProgram(self.spec, self.longest, needs_sampler)

    def weights(self) -> DraftInputs:
        target = self.target
        return DraftInputs(
            self.placed,
            self.target_ids,
            target.params.top["embed_tokens"],
            target.bias,
            sampling_of(target, self.greedy),
        )
