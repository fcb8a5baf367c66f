"""The device-resident driver: many cycles in one `lax.while_loop`, the host asked once.

It traces `specdec.cycle.cycle` itself, with a target and a drafter whose methods act on traced
state: one step, two drivers.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from drafters.resident_jax import Resident, State, Traced
from specdec.cycle import cycle
from specdec.protocols import Cycle
from specdec.types import NO_GUESS, Array, LogprobRows, Round, Sequence, Step
from targets.jax import programs, sampling
from targets.jax.params import Params
from targets.jax.placing import replicated
from targets.jax.programs import Feed, Plan
from targets.jax.target import JaxTarget, pick_rows
from targets.rules import Rules

CYCLES = 8
"""Cycles per dispatch: enough to hide the host, few enough that streaming stays smooth."""
STOPS = 16
"""Stop ids per row that the device knows; the engine cuts by all of them in any case."""


class Limits(NamedTuple):
    """Per slot: stop_ids [B, STOPS] (NO_GUESS: unused) and the longest length [B]. For all:
    cycles [], how many to run at most."""

    stop_ids: Array
    length: Array
    cycles: Array


class Tape(NamedTuple):
    """What each cycle did [cycles, B, ...]: the host reads it once per dispatch."""

    draft: Array
    chosen: Array
    accepted: Array
    logprobs: LogprobRows | None


class _TracedTarget:
    """`Target.verify` on traced state: the rows are a State, updated in place of the slots."""

    def __init__(self, job: Job, given: Given, state: State) -> None:
        self.job, self.given, self.state = job, given, state

    def verify(self, seqs: State, draft: Array) -> Step:
        plan, given, cache = self.job.plan, self.given, seqs.cache
        last = jnp.take_along_axis(cache.tokens, seqs.length[:, None] - 1, 1)
        padding = jnp.full((plan.slots, plan.width - 1 - draft.shape[1]), NO_GUESS, jnp.int32)
        count = jnp.where(seqs.live, plan.width, 0)
        feed = Feed(jnp.concatenate([last, draft, padding], 1), seqs.length - 1, count)
        cache, out = programs.verify(plan, given.params, cache, feed)
        # a wall, so that choosing cannot be fused into the forward and change its arithmetic
        logits = jax.lax.optimization_barrier(out.logits)
        chosen = programs.choose(
            plan, self.job.shaped, logits, given.bias, given.rules, cache.tokens, feed
        )
        self.state = seqs._replace(cache=cache)
        details = sampling.logprobs(logits, chosen) if self.job.logprobs else None
        width = draft.shape[1] + 1
        features = None if out.features is None else out.features[:, :width]
        return Step(chosen[:, :width], features, details)


class Job(NamedTuple):
    """What a device loop is compiled for."""

    plan: Plan
    drafter: Traced
    k: int
    cycles: int
    shaped: bool
    logprobs: bool


class Loop(NamedTuple):
    """What the loop carries: the rows, and the drafter's own memory."""

    rows: State
    memory: Any


class Given(NamedTuple):
    """What the loop only reads: the target's weights and sampling parameters by slot, the
    drafter's weights, and where rows end."""

    params: Params
    bias: Array
    rules: Rules
    drafter: Any
    limits: Limits


def run_cycles(job: Job, given: Given, loop: Loop) -> tuple[Loop, Tape, Array]:
    """Up to `limits.cycles` cycles, fewer once no row is live; the tape, and how many ran."""
    _, shapes = jax.eval_shape(partial(_one_cycle, job, given), loop)
    tape = jax.tree.map(lambda s: jnp.zeros((job.cycles, *s.shape), s.dtype), shapes)

    def go_on(carry: tuple[Array, Loop, Tape]) -> Array:
        return (carry[0] < given.limits.cycles) & carry[1].rows.live.any()

    def body(carry: tuple[Array, Loop, Tape]) -> tuple[Array, Loop, Tape]:
        i, loop, tape = carry
        loop, entry = _one_cycle(job, given, loop)
        return i + 1, loop, jax.tree.map(lambda all_, one: all_.at[i].set(one), tape, entry)

    ran, loop, tape = jax.lax.while_loop(go_on, body, (jnp.int32(0), loop, tape))
    return loop, tape, ran


def _one_cycle(job: Job, given: Given, loop: Loop) -> tuple[Loop, Tape]:
    target = _TracedTarget(job, given, loop.rows)
    drafter = job.drafter.on(given.drafter, loop.memory)
    rows: Any = loop.rows
    done = cycle(target, drafter, rows, job.k)  # type: ignore[arg-type]
    rows = _commit(target.state, done, given.limits)
    tape = Tape(done.draft, done.step.chosen, done.accepted, done.step.logprobs)
    return Loop(rows, drafter.memory), tape


def _commit(state: State, done: Round, limits: Limits) -> State:
    """Append what was chosen to each live row's text and see who has come to an end."""
    chosen, kept = done.step.chosen, done.accepted
    offset = jnp.arange(chosen.shape[1])
    emitted = (offset <= kept[:, None]) & state.live[:, None]
    place = jnp.where(emitted, state.length[:, None] + offset, state.cache.tokens.shape[1])
    row = jnp.arange(chosen.shape[0])[:, None]
    tokens = state.cache.tokens.at[row, place].set(chosen, mode="drop")
    length = state.length + jnp.where(state.live, kept + 1, 0).astype(jnp.int32)
    stops = (chosen[..., None] == limits.stop_ids[:, None]).any(-1) & emitted
    live = state.live & ~stops.any(1) & (length < limits.length)
    return State(state.cache._replace(tokens=tokens), length, live)


def device_cycle(target: JaxTarget, drafter: Resident, k: int, cycles: int = CYCLES) -> Cycle:
    """A `Cycle` for the engine: one dispatch, up to `cycles` rounds."""
    programs_: dict[Job, Any] = {}
    whole = replicated(target.mesh)  # the tape is read by each process's host

    def rounds(seqs: Rows[Sequence], hurry: bool) -> list[Round]:
        shaped = any(seq.sampling.shaped for seq in seqs)
        logprobs = any(seq.sampling.logprobs is not None for seq in seqs)
        job = Job(target.plan, drafter.traced(shaped), k, cycles, shaped, logprobs)
        if job not in programs_:
            programs_[job] = jax.jit(
                partial(run_cycles, job), donate_argnums=1, out_shardings=(None, whole, whole)
            )
        drafter.ready(seqs)
        limits, state = _start(target, seqs, 1 if hurry else cycles)
        given = Given(target.params, target.bias, target.rules(), drafter.weights(), limits)
        loop, tape, ran = programs_[job](given, Loop(state, drafter.memory))
        target.cache, drafter.memory = loop.rows.cache, loop.memory
        return _replay(tape, int(ran), np.array([seq.slot for seq in seqs]))

    return rounds


def _start(target: JaxTarget, seqs: Rows[Sequence], cycles: int) -> tuple[Limits, State]:
    """The host's view of the rows; each last token is put where the device looks for it."""
    slots = target.slots
    stop_ids = np.full((slots, STOPS), NO_GUESS, np.int32)
    limit, length = np.ones(slots, np.int32), np.ones(slots, np.int32)
    live = np.zeros(slots, bool)
    last = np.full(slots, target.cache.tokens.shape[1], np.int32)
    token = np.zeros(slots, np.int32)
    for seq in seqs:
        known = sorted(seq.stop_ids)[:STOPS]
        stop_ids[seq.slot, : len(known)] = known
        limit[seq.slot] = min(seq.prompt_len + seq.max_tokens, target.max_len)
        length[seq.slot] = len(seq.tokens)
        live[seq.slot] = True
        last[seq.slot], token[seq.slot] = len(seq.tokens) - 1, seq.tokens[-1]
    cache = target.cache._replace(tokens=_put_last(target.cache.tokens, last, token))
    return Limits(stop_ids, limit, np.int32(cycles)), State(cache, length, live)


@partial(jax.jit, donate_argnums=0)
def _put_last(tokens: Array, last: Array, token: Array) -> Array:
    return tokens.at[jnp.arange(tokens.shape[0]), last].set(token, mode="drop")


def _replay(tape: Tape, ran: int, rows: np.ndarray) -> list[Round]:
    tape = jax.tree.map(np.asarray, tape)  # the one copy to the host
    rounds = []
    for i in range(ran):
        draft, chosen, accepted, details = jax.tree.map(lambda leaf: leaf[i], tape)  # noqa: B023
        step = Step(chosen[rows], None, details and pick_rows(details, rows))
        rounds.append(Round(draft[rows], step, accepted[rows]))
    return rounds
