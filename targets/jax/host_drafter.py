"""The traced loop's drafters, driven by the host: what a dispatch traces of them, as programs of
their own.

`SteppedDrafter` runs any `DeviceDrafter` for one cycle at a time. `HostHead` is the whole `Drafter`
of a head that reads the target's features.
"""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from dataclasses import replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specdec.core.types import Array, Proposal, Sequence, Step
from targets.jax.device_drafter import DeviceDrafter, SlotState, TracedProgram
from targets.jax.placing import replicated
from targets.jax.target import JaxTarget
from targets.sampling_params import SamplingTable


class DraftHead(DeviceDrafter, Protocol):
    """A drafter with weights that reads the target's features. Its state is `memory`, by slot."""

    @property
    def target(self) -> JaxTarget: ...

    def prefill(self, seq: Sequence, start: int, stop: int, step: Step) -> None:
        """As `Drafter.prefill`."""
        ...


class SteppedDrafter:
    """`Proposer` of the host's rows."""

    def __init__(self, target: JaxTarget, drafter: DeviceDrafter) -> None:
        self._target, self._drafter = target, drafter
        whole = replicated(target.mesh)
        self._propose = jax.jit(
            _propose, static_argnums=(0, 1), donate_argnums=3, out_shardings=(None, whole)
        )
        self._observe = jax.jit(_observe, static_argnums=0, donate_argnums=2)

    def propose(self, seqs: Seqs[Sequence], k: int) -> Proposal:
        """One dispatch, of all slots."""
        drafter, rows = self._drafter, [seq.slot for seq in seqs]
        batch = slot_state(self._target, seqs)
        self._target.cache = batch.cache
        program = drafter.program(any(seq.sampling.needs_sampler for seq in seqs))
        drafter.memory, made = self._propose(program, k, drafter.weights(), drafter.memory, batch)
        source = None if made.source is None else np.asarray(made.source)[rows]
        return replace(made, tokens=np.asarray(made.tokens)[rows], source=source)

    def observe(self, seqs: Seqs[Sequence], step: Step, accepted: Array) -> None:
        """The slots' texts are as `propose` left them."""
        assert step.features is None or step.by_slot, "the JAX target's features lie by slot"
        drafter, target = self._drafter, self._target
        rows = [seq.slot for seq in seqs]
        chosen = np.zeros((target.slots, step.chosen.shape[1]), np.int32)
        kept = np.zeros(target.slots, np.int32)
        chosen[rows], kept[rows] = step.chosen, accepted
        batch = SlotState(target.cache, *lengths_of(target, seqs))
        program, weights = drafter.program(needs_sampler=False), drafter.weights()
        learned = batch, chosen, step.features, kept
        drafter.memory = self._observe(program, weights, drafter.memory, *learned)


Head = TypeVar("Head", bound=DraftHead)


class HostHead(Generic[Head]):
    """A head as the host loop's `Drafter`."""

    def __init__(self, head: Head) -> None:
        self.head, self.target = head, head.target
        self._stepped = SteppedDrafter(head.target, head)

    def reset(self, seq: Sequence) -> None:
        pass  # the new owner's prompt overwrites the slot before anything reads it

    def prefill(self, seq: Sequence, start: int, stop: int, step: Step) -> None:
        self.head.prefill(seq, start, stop, step)

    def propose(self, seqs: Seqs[Sequence], k: int) -> Proposal:
        return self._stepped.propose(seqs, k)

    def observe(self, seqs: Seqs[Sequence], step: Step, accepted: Array) -> None:
        assert step.features is not None, "the target was loaded without the head's layers"
        self._stepped.observe(seqs, step, accepted)


def sampling_of(target: JaxTarget, greedy: bool) -> SamplingTable:
    """The requests' sampling parameters by slot, as guesses follow them. greedy: at temperature 0,
    as other engines draft (to compare)."""
    table = target.sampling_params()
    return table._replace(temperature=jnp.zeros_like(table.temperature)) if greedy else table


def lengths_of(target: JaxTarget, seqs: Seqs[Sequence]) -> tuple[Array, Array]:
    """Each slot's length [slots] int32 in tokens, 1 where no row is, and whether a row is there."""
    length, live = np.ones(target.slots, np.int32), np.zeros(target.slots, bool)
    rows = [seq.slot for seq in seqs]
    length[rows], live[rows] = [len(seq.tokens) for seq in seqs], True
    return length, live


def slot_state(target: JaxTarget, seqs: Seqs[Sequence]) -> SlotState:
    """The rows as the traced loop's batch. It takes the target's cache, with each row's last token
    in its history; the caller puts the cache back."""
    last = np.full(target.slots, target.cache.tokens.shape[1], np.int32)
    token = np.zeros(target.slots, np.int32)
    for seq in seqs:
        last[seq.slot], token[seq.slot] = len(seq.tokens) - 1, seq.tokens[-1]
    cache = target.cache._replace(tokens=_put_last(target.cache.tokens, last, token))
    return SlotState(cache, *lengths_of(target, seqs))


@partial(jax.jit, donate_argnums=0)
def _put_last(tokens: Array, last: Array, token: Array) -> Array:
    return tokens.at[jnp.arange(tokens.shape[0]), last].set(token, mode="drop")


def _propose(
    program: TracedProgram, k: int, weights: Any, memory: Any, batch: SlotState
) -> tuple[Any, Proposal]:
    drafter = program.on(weights, memory)
    proposal = drafter.propose(batch, k)
    return drafter.memory, proposal


def _observe(
    program: TracedProgram,
    weights: Any,
    memory: Any,
    batch: SlotState,
    chosen: Array,
    features: Array | None,
    kept: Array,
) -> Any:
    drafter = program.on(weights, memory)
    drafter.observe(batch, Step(chosen, features), kept)
    return drafter.memory
