"""The device-resident driver: many cycles in one `lax.while_loop`, one dispatch by the host.

It traces `specdec.core.cycle.cycle`, the same as in the host loop, with a target and a drafter that
act on traced state.
"""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specdec.core.constraint import constrained, forced_prefix_of, put_forced_first, takes_known
from specdec.core.cycle import cycle, guided_cycle
from specdec.core.protocols import Cycle
from specdec.core.script import Script, ScriptedTarget, scripted_choice
from specdec.core.types import (
    MAX_DRAFT,
    NO_GUESS,
    Array,
    ForcedPrefix,
    LogprobRows,
    Proposal,
    Round,
    Sequence,
    Step,
)
from targets.jax import programs, sampling
from targets.jax.device_drafter import DeviceDrafter, SlotState, TracedDrafter, TracedProgram
from targets.jax.host_drafter import SteppedDrafter, slot_state
from targets.jax.params import Params
from targets.jax.placing import replicated
from targets.jax.programs import Feed, Plan, bind
from targets.jax.script import PlacedScript, ScriptedDeviceDrafter, ScriptTables, coming
from targets.jax.target import JaxTarget, pick_rows
from targets.sampling_params import Rules, SamplingTable

CYCLES = 8
"""Cycles per dispatch: enough to hide the host, few enough that streaming stays smooth."""
STOPS = 16
"""Stop ids per row that the device checks; the engine checks all of them in any case."""


@dataclass(frozen=True)
class LoopPlan:
    """What a device loop is compiled for."""

    plan: Plan
    drafter: TracedProgram
    k: int
    cycles: int
    """Most cycles of a dispatch."""
    needs_sampler: bool
    """Whether any row's choice is more than the raw argmax."""
    logprobs: bool


@struct.dataclass
class Limits:
    """Where the rows of a dispatch end. Written by the host."""

    stop_ids: Array
    """[B, STOPS] int32, NO_GUESS where unused."""
    length: Array
    """[B] int32: the longest each text may become."""
    cycles: Array
    """[]: how many cycles to run at most."""
    guesses: Array
    """[B] int32: the most guesses that each row's request allows."""


@struct.dataclass
class LoopInputs:
    """What the loop only reads. Written by the host."""

    params: Params
    bias: Array
    sampling_params: SamplingTable
    """The requests' sampling parameters, by slot."""
    drafter: Any
    """The drafter's weights."""
    limits: Limits
    script: ScriptTables | None = None
    """The text that replaces what was chosen (speed tests)."""


@struct.dataclass
class LoopState:
    """What the loop carries."""

    slots: SlotState
    memory: Any
    """The drafter's own."""
    forced_prefix: Array
    """[B, k] int32: tokens that come first in the next cycle's draft. Set by the host for the first
    cycle of a dispatch, none in others."""


@struct.dataclass
class Tape:
    """What each cycle did [cycles, B, ...]: the host reads it once per dispatch."""

    proposal: Proposal
    chosen: Array
    accepted: Array
    logprobs: LogprobRows | None


class _TracedTarget:
    """`Verifier` of traced state. `state` is what the verify left behind."""

    def __init__(self, plan: LoopPlan, inputs: LoopInputs, state: SlotState) -> None:
        self.plan, self.inputs, self.state = plan, inputs, state

    def verify(self, batch: SlotState, draft: Array) -> Step:
        plan, inputs, cache = self.plan.plan, self.inputs, batch.cache
        last = jnp.take_along_axis(cache.tokens, batch.length[:, None] - 1, 1)
        padding = jnp.full((plan.slots, plan.width - 1 - draft.shape[1]), NO_GUESS, jnp.int32)
        count = jnp.where(batch.live, plan.width, 0)
        feed = Feed(jnp.concatenate([last, draft, padding], 1), batch.length - 1, count)
        cache, out = programs.verify(plan, inputs.params, cache, feed)
        # a wall, so that choosing cannot be fused into the forward and change its arithmetic
        logits = jax.lax.optimization_barrier(out.logits)
        rules = Rules(inputs.bias, inputs.sampling_params, cache.tokens)
        chosen = programs.choose(plan, self.plan.needs_sampler, logits, rules, feed)
        if inputs.script is not None:
            scripted = coming(inputs.script.scripted, batch.length, plan.width)
            chosen = scripted_choice(scripted, chosen)
        self.state = replace(batch, cache=cache)
        details = None
        if self.plan.logprobs:
            details = sampling.logprobs(logits, chosen, rules.bias, rules.sampling_params)
        width = draft.shape[1] + 1
        features = None if out.features is None else out.features[:, :width]
        return Step(chosen[:, :width], features, details)


class _GuidedDrafter:
    """A traced drafter with the host's tokens put first, and with each row's guesses limited to its
    request's maximum."""

    def __init__(self, drafter: TracedDrafter, forced_prefix: Array, most: Array) -> None:
        self._drafter, self._forced_prefix, self._most = drafter, forced_prefix, most

    def propose(self, batch: SlotState, k: int) -> Proposal:
        own = self._drafter.propose(batch, k)
        wanted = jnp.arange(k) < self._most[:, None]
        draft = jnp.where(wanted, own.tokens, NO_GUESS)
        return replace(own, tokens=put_forced_first(self._forced_prefix, draft))

    def observe(self, batch: SlotState, step: Step, accepted: Array) -> None:
        self._drafter.observe(batch, step, accepted)


def run_cycles(
    plan: LoopPlan, inputs: LoopInputs, loop: LoopState
) -> tuple[LoopState, Tape, Array]:
    """Up to `limits.cycles` cycles, fewer once no row is live; the tape, and how many ran."""
    one_cycle = jax.jit(partial(_one_cycle, plan), inline=True)  # traced once, for both uses
    _, shapes = jax.eval_shape(one_cycle, inputs, loop)
    tape = jax.tree.map(lambda s: jnp.zeros((plan.cycles, *s.shape), s.dtype), shapes)

    def go_on(carry: tuple[Array, LoopState, Tape]) -> Array:
        return (carry[0] < inputs.limits.cycles) & carry[1].slots.live.any()

    def body(carry: tuple[Array, LoopState, Tape]) -> tuple[Array, LoopState, Tape]:
        i, loop, tape = carry
        loop, entry = one_cycle(inputs, loop)
        return i + 1, loop, jax.tree.map(lambda all_, one: all_.at[i].set(one), tape, entry)

    ran, loop, tape = jax.lax.while_loop(go_on, body, (jnp.int32(0), loop, tape))
    return loop, tape, ran


def _one_cycle(plan: LoopPlan, inputs: LoopInputs, loop: LoopState) -> tuple[LoopState, Tape]:
    target = _TracedTarget(plan, inputs, loop.slots)
    drafter = plan.drafter.on(inputs.drafter, loop.memory)
    guided_drafter = _GuidedDrafter(drafter, loop.forced_prefix, inputs.limits.guesses)
    done = cycle(target, guided_drafter, loop.slots, plan.k)
    slots = _commit(target.state, done, inputs.limits)
    entry = Tape(done.proposal, done.step.chosen, done.accepted, done.step.logprobs)
    nothing = jnp.full_like(loop.forced_prefix, NO_GUESS)
    return LoopState(slots, drafter.memory, nothing), entry


def _commit(state: SlotState, done: Round, limits: Limits) -> SlotState:
    """Append what was chosen to each live row's text and find the rows that have ended."""
    chosen, kept = done.step.chosen, done.accepted
    offset = jnp.arange(chosen.shape[1])
    emitted = (offset <= kept[:, None]) & state.live[:, None]
    place = jnp.where(emitted, state.length[:, None] + offset, state.cache.tokens.shape[1])
    row = jnp.arange(chosen.shape[0])[:, None]
    tokens = state.cache.tokens.at[row, place].set(chosen, mode="drop")
    length = state.length + jnp.where(state.live, kept + 1, 0).astype(jnp.int32)
    stops = (chosen[..., None] == limits.stop_ids[:, None]).any(-1) & emitted
    live = state.live & ~stops.any(1) & (length < limits.length)
    return SlotState(state.cache._replace(tokens=tokens), length, live)


def device_loop(
    target: JaxTarget,
    drafter: DeviceDrafter,
    k: int,
    cycles: int = CYCLES,
    script: Script | None = None,
) -> Cycle:
    """A `Cycle` for the engine: one dispatch, up to `cycles` rounds. script: the text that replaces
    the target's choices (speed tests)."""
    placed = None if script is None else PlacedScript(script, target.mesh)
    if placed is not None and placed.script.recorded:
        drafter = placed.script.wrap_weighted(
            drafter, partial(ScriptedDeviceDrafter, placed=placed)
        )
    one_by_one = target if script is None else ScriptedTarget(target, script)
    compiled: dict[LoopPlan, Any] = {}
    whole = replicated(target.mesh)  # the tape is read by each process's host

    stepped = SteppedDrafter(target, drafter)

    def rounds(seqs: Seqs[Sequence], single: bool) -> list[Round]:
        choice = drafter.ready(seqs)
        if constrained(seqs):  # masks come from the host, each cycle
            return [guided_cycle(one_by_one, stepped, seqs, k)]
        needs_sampler = any(seq.sampling.needs_sampler for seq in seqs)
        logprobs = any(seq.sampling.logprobs is not None for seq in seqs)
        program = drafter.program(needs_sampler)
        plan = LoopPlan(target.plan, program, k, cycles, needs_sampler, logprobs)
        if plan not in compiled:
            compiled[plan] = jax.jit(
                bind(run_cycles, plan), donate_argnums=1, out_shardings=(None, whole, whole)
            )
        guided = takes_known(choice, seqs)
        forced_prefix = forced_prefix_of(seqs, k) if guided else None
        several = not single and not guided and choice.repeats
        limits = _limits(target, seqs, cycles if several else 1)
        state = slot_state(target, seqs)
        weights = drafter.weights()
        scripted = None if placed is None else placed.tables()
        inputs = LoopInputs(
            target.params, target.bias, target.sampling_params(), weights, limits, scripted
        )
        first = _by_slot(forced_prefix, seqs, target.slots, k)
        loop, tape, ran = compiled[plan](inputs, LoopState(state, drafter.memory, first))
        target.cache, drafter.memory = loop.slots.cache, loop.memory
        return _replay(tape, int(ran), seqs, forced_prefix)

    return rounds


def _limits(target: JaxTarget, seqs: Seqs[Sequence], cycles: int) -> Limits:
    slots = target.slots
    stop_ids = np.full((slots, STOPS), NO_GUESS, np.int32)
    limit, guesses = np.ones(slots, np.int32), np.zeros(slots, np.int32)
    for seq in seqs:
        known = sorted(seq.stop_ids)[:STOPS]
        stop_ids[seq.slot, : len(known)] = known
        limit[seq.slot] = min(seq.prompt_len + seq.max_tokens, target.max_len)
        guesses[seq.slot] = seq.most_guesses(MAX_DRAFT)
    return Limits(stop_ids, limit, np.int32(cycles), guesses)


def _by_slot(
    forced_prefix: ForcedPrefix | None, seqs: Seqs[Sequence], slots: int, k: int
) -> np.ndarray:
    """[slots, k] int32, NO_GUESS where nothing is known."""
    rows = np.full((slots, k), NO_GUESS, np.int32)
    if forced_prefix is not None:
        rows[[seq.slot for seq in seqs]] = forced_prefix.rows
    return rows


def _replay(
    tape: Tape, ran: int, seqs: Seqs[Sequence], forced_prefix: ForcedPrefix | None
) -> list[Round]:
    """forced_prefix: what came first in the first cycle."""
    tape = jax.tree.map(np.asarray, tape)  # the one copy to the host
    rows = np.array([seq.slot for seq in seqs])
    rounds = []
    for i in range(ran):
        now = jax.tree.map(lambda leaf: leaf[i], tape)  # noqa: B023
        details = now.logprobs and pick_rows(now.logprobs, rows)
        step = Step(now.chosen[rows], None, details)
        first = forced_prefix if i == 0 else None
        proposal = jax.tree.map(lambda leaf: leaf[rows], now.proposal)
        rounds.append(Round(proposal, step, now.accepted[rows], first))
    return rounds
