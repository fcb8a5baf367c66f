"""A script in the traced loop (`specdec.core.script`): its tables on the device, and a drafter
with as many right guesses as were recorded."""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec.core.script import Script, recorded_draft
from specdec.core.types import Array, CycleChoice, Proposal, Sequence, Step
from targets.jax.device_drafter import DeviceDrafter, SlotState, TracedDrafter, TracedProgram
from targets.jax.placing import put, replicated


class ScriptTables(NamedTuple):
    """`Script`'s tables [slots, positions] int32."""

    scripted: Array
    right: Array


class PlacedScript:
    """A script's tables on the device, copied anew when a slot has a new owner."""

    def __init__(self, script: Script, mesh: jax.sharding.Mesh | None) -> None:
        self.script, self._place = script, replicated(mesh)
        self._version, self._tables = -1, None

    def tables(self) -> Any:
        if self._version != self.script.version:
            both = self.script.scripted, self.script.right
            self._tables = ScriptTables(*(put(table.copy(), self._place) for table in both))
            self._version = self.script.version
        return self._tables


def coming(table: Array, length: Array, count: int) -> Array:
    """The entries [B, count] from position length [B] on."""
    return jnp.take_along_axis(table, length[:, None] + jnp.arange(count), 1)


class ScriptedDeviceDrafter:
    """A `DeviceDrafter` around another."""

    def __init__(self, drafter: DeviceDrafter, placed: PlacedScript) -> None:
        self._drafter, self._placed = drafter, placed

    @property
    def memory(self) -> Any:
        return self._drafter.memory

    @memory.setter
    def memory(self, memory: Any) -> None:
        self._drafter.memory = memory

    def ready(self, seqs: Seqs[Sequence]) -> CycleChoice:
        return self._drafter.ready(seqs)

    def program(self, needs_sampler: bool) -> TracedProgram:
        return _Program(self._drafter.program(needs_sampler))

    def weights(self) -> Any:
        return self._drafter.weights(), self._placed.tables()


@dataclass(frozen=True)
class _Program:
    inner: TracedProgram

    def on(self, weights: Any, memory: Any) -> TracedDrafter:
        own, tables = weights
        return _Traced(self.inner.on(own, memory), tables)


class _Traced:
    def __init__(self, inner: TracedDrafter, tables: ScriptTables) -> None:
        self._inner, self._tables = inner, tables

    @property
    def memory(self) -> Any:
        return self._inner.memory

    def propose(self, batch: SlotState, k: int) -> Proposal:
        own = self._inner.propose(batch, k)
        scripted = coming(self._tables.scripted, batch.length, k)
        right = coming(self._tables.right, batch.length, 1)[:, 0]
        return replace(own, tokens=recorded_draft(scripted, right, own.tokens, jnp.arange(k)))

    def observe(self, batch: SlotState, step: Step, accepted: Array) -> None:
        self._inner.observe(batch, step, accepted)
