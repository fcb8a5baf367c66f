"""The traced loop's drafters: methods on traced state, and arrays of their own.

A drafter's folder brings a `DeviceDrafter` for this target. `TextDrafter` is one for drafters that
are a pure function of the text; others bring weights, which are read, and a memory, which each
dispatch takes and gives back.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence as Seqs
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from flax import struct

from specdec.core.protocols import Proposer
from specdec.core.types import Array, CycleChoice, Proposal, Sequence, Step
from targets.jax.cache import Cache

jax.tree_util.register_dataclass(Proposal, ["tokens", "source"], ["names"])


@struct.dataclass
class SlotState:
    """The traced loop's batch: a row per slot. Written by the loop."""

    cache: Cache
    """The target's, with the slots' texts in `cache.tokens`."""
    length: Array
    """[B] int32: tokens so far, the last one not yet fed."""
    live: Array
    """[B] bool: whether the row goes on."""


class TracedDrafter(Proposer[SlotState], Protocol):
    """The drafter while a cycle is traced."""

    memory: Any
    """Arrays that it has changed, or left as they were."""


class TracedProgram(Hashable, Protocol):
    """What of a drafter is compiled in."""

    def on(self, weights: Any, memory: Any) -> TracedDrafter: ...


class DeviceDrafter(Protocol):
    """A drafter of the traced loop, as the host holds it between dispatches."""

    memory: Any
    """Arrays that a dispatch takes (donated) and gives back."""

    def ready(self, seqs: Seqs[Sequence]) -> CycleChoice:
        """The host's work for these rows before a dispatch, and how that dispatch runs. The loop
        calls it first."""
        ...

    def program(self, needs_sampler: bool) -> TracedProgram:
        """needs_sampler: whether any row's choice is more than the raw argmax. `observe` is the
        same either way."""
        ...

    def weights(self) -> Any:
        """Arrays that a dispatch only reads."""
        ...


class TextFunction(Hashable, Protocol):
    """A drafter that is a pure function of the text."""

    def propose(self, history: Array, length: Array, k: int) -> Array:
        """history [B, S] int32, of which length [B] are real -> draft [B, k], NO_GUESS allowed."""
        ...


class TextDrafter:
    """A `DeviceDrafter` of a pure function of the text: nothing to read, nothing to keep."""

    memory: Any = ()

    def __init__(self, function: TextFunction) -> None:
        self.function = function

    def ready(self, seqs: Seqs[Sequence]) -> CycleChoice:
        return CycleChoice()

    def program(self, needs_sampler: bool) -> TracedProgram:
        return _TextProgram(self.function)

    def weights(self) -> Any:
        return ()


@dataclass(frozen=True)
class _TextProgram:
    function: TextFunction

    def on(self, weights: Any, memory: Any) -> TracedDrafter:
        return _TextRows(self.function)


class _TextRows:
    memory: Any = ()

    def __init__(self, function: TextFunction) -> None:
        self.function = function

    def propose(self, batch: SlotState, k: int) -> Proposal:
        return Proposal(self.function.propose(batch.cache.tokens, batch.length, k))

    def observe(self, batch: SlotState, step: Step, accepted: Array) -> None:
        pass
