"""A block drafter beside the JAX target: the host's part of drafting with it. `draft.py` has the
traced part."""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from dataclasses import replace
from typing import Any

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
        top, weights = target.params.top, dict(head.weights)
        tables = {"embed_tokens": top["embed_tokens"], "lm_head": top[target.arch.head]}
        for name, table in tables.items():
            if name in weights and equals(weights[name], table):
                del weights[name]
        own = {"own_table": "embed_tokens" in weights, "own_head": "lm_head" in weights}
        self.spec: BlockSpec = replace(head.spec, **own)
        self.weights = place(weights, self.spec.body, target.dtype, target.mesh)
        self._tables: dict[str, Any] = {
            name: self.weights.pop(name, table) for name, table in tables.items()
        }
        ids, whole = head.target_ids, replicated(target.mesh)
        if ids is None and self.spec.vocab < target.arch.vocab:  # the target's is padded
            ids = np.arange(self.spec.vocab)
        self.target_ids = None if ids is None else put(ids.astype(np.int32), whole)

    def inputs(self) -> DraftInputs:
        target = self.target
        return DraftInputs(
            self.weights,
            self.target_ids,
            self._tables["embed_tokens"],
            self._tables["lm_head"],
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
