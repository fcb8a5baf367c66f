"""A block drafter beside the JAX target: the host's part of drafting with it. `draft.py` has the
traced part."""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from dataclasses import replace

import jax
import numpy as np

from drafters.dflash.jax import draft as drafting
from drafters.dflash.jax.body import equals, make_caches, place
from drafters.dflash.jax.draft import BlockProgram, DraftInputs
from drafters.dflash.spec import BlockHead, BlockSpec, check_pair
from specdec.core.types import CycleChoice, Sequence, Step
from targets.jax.host_drafter import sampling_of
from targets.jax.placing import put, replicated
from targets.jax.programs import bind
from targets.jax.target import JaxTarget

NO_FEATURES = "the target was loaded without the head's layers"


class PlacedBlock:
    """One head's weights beside its target: all of its drafters share them. Stored tables that are
    the target's own are not loaded twice."""

    def __init__(self, head: BlockHead, target: JaxTarget, greedy: bool = False) -> None:
        """greedy: guess the argmax at any temperature, as other engines do (to compare).

        Raises UserError for a head of another target.
        """
        check_pair(head.spec, target.arch)
        assert target.plan.features == head.spec.taps, (target.plan.features, head.spec.taps)
        self.target, self.greedy = target, greedy
        self.longest = target.max_len
        ids, whole = head.target_ids, replicated(target.mesh)
        if ids is None and head.spec.vocab < target.arch.vocab:  # the target's is padded
            ids = np.arange(head.spec.vocab)
        self.target_ids = None if ids is None else put(ids.astype(np.int32), whole)
        top = target.params.top
        self._tables = {"embed_tokens": top["embed_tokens"], "lm_head": top[target.arch.head]}
        own = {
            name: name in head.weights and not equals(head.weights[name], table)
            for name, table in self._tables.items()
        }
        self.spec: BlockSpec = replace(
            head.spec, own_table=own["embed_tokens"], own_head=own["lm_head"]
        )
        self.read(head.weights)

    def read(self, weights: dict[str, np.ndarray]) -> None:
        """Take these weights, of the same spec."""
        shared = {"embed_tokens": self.spec.own_table, "lm_head": self.spec.own_head}
        kept = {name: value for name, value in weights.items() if shared.get(name, True)}
        target = self.target
        self.weights = place(kept, self.spec.body, target.dtype, target.mesh)

    def inputs(self) -> DraftInputs:
        target = self.target
        return DraftInputs(
            self.weights,
            self.target_ids,
            self.weights.get("embed_tokens", self._tables["embed_tokens"]),
            self.weights.get("lm_head", self._tables["lm_head"]),
            target.bias,
            sampling_of(target, self.greedy),
        )


class BlockDraftHead:
    """A `DraftHead`. Its memory is the keys and values of the accepted tokens, by slot."""

    def __init__(self, placed: PlacedBlock) -> None:
        self.placed, self.target = placed, placed.target
        sizes = self.target.slots, placed.longest, self.target.dtype
        self.memory = make_caches(placed.spec, *sizes, self.target.mesh)
        self._read = jax.jit(bind(drafting.read, self.program(False)), donate_argnums=1)

    def prefill(self, seq: Sequence, start: int, stop: int, step: Step) -> None:
        """Each position's entry is made of its features alone."""
        assert step.features is not None, NO_FEATURES
        where = np.int32(seq.slot), step.features, np.int32(start), np.int32(stop - start)
        self.memory = self._read(self.weights(), self.memory, *where)

    def ready(self, seqs: Seqs[Sequence]) -> CycleChoice:
        return CycleChoice()

    def program(self, needs_sampler: bool) -> BlockProgram:
        return BlockProgram(self.placed.spec, self.placed.longest, needs_sampler)

    def weights(self) -> DraftInputs:
        return self.placed.inputs()
