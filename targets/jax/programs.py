"""The compiled programs of the JAX target: forward over slots, choose, prefill.

Everything is indexed by slot. Two ways to run the rows, the same body:
- mapped (CPU): a loop with a traced trip count runs the one-row forward for each live slot. A
  row's arithmetic is then the same program with any other rows in the batch: exact by construction,
  and on a CPU, which is bound by arithmetic, it costs nothing.
- batched (TPU, GPU): all slots of a bucket in one call, so that the weights are read once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from specdec.core.types import Array
from targets.arch import Arch
from targets.jax import kv_exchange, sampling
from targets.jax.cache import Cache, Span
from targets.jax.model import Hidden, Merged, decode, head
from targets.jax.params import Params
from targets.sampling_params import Rules

Tree = TypeVar("Tree")


@lru_cache(maxsize=64, typed=True)
def bind(program: Callable[..., Any], *static: Hashable) -> Callable[..., Any]:
    """`program` with these first arguments, which are compiled in. Equal arguments give the same
    object, which is the key of JAX's cache: what one target, loop or drafter has compiled, the next
    one of its kind in this process reuses without tracing it again."""
    return partial(program, *static)


@dataclass(frozen=True)
class Plan:
    """What a program is compiled for: everything static."""

    arch: Arch
    slots: int
    max_len: int
    width: int
    """Tokens per row and verify call, T = K_max + 1, for plain decoding too: one width."""
    chunk: int
    """Tokens per prefill call; chunks are cut at its absolute multiples."""
    features: tuple[int, ...]
    mapped: bool
    pictures: int = field(default=0, repr=False)
    """Soft tokens of the largest picture, which one prefill call reads whole; 0: none are read."""

    @property
    def widest(self) -> int:
        """Tokens of a prefill call with a picture."""
        return max(self.chunk, self.pictures)

    @property
    def block(self) -> int:
        """Entries of a long cache that attention reads at a time."""
        longest = kv_exchange.BLOCK
        return min(longest, kv_exchange.MAPPED_BLOCK) if self.mapped else longest

    @property
    def slack(self) -> int:
        """Extra cache entries, so that no call overwrites what its own queries still see."""
        return max(self.width, self.widest)


class Feed(NamedTuple):
    """tokens [B, T] int32, start [B], count [B] (0: the slot sits this call out), by slot."""

    tokens: Array
    start: Array
    count: Array


class ForwardOutput(NamedTuple):
    """logits [B, T, V] float32, soft-capped; features [B, T, F] or None."""

    logits: Array
    features: Array | None


def verify(plan: Plan, params: Params, cache: Cache, feed: Feed) -> tuple[Cache, ForwardOutput]:
    """Feed every live slot its tokens and return the logits after each of them."""
    if not plan.mapped:
        return _run(plan, params, cache, feed, 0)
    slots = feed.tokens.shape[0]
    order, live = _live_first(feed)
    run = jax.jit(partial(_run, plan), inline=True)  # traced once, for shapes and for the loop
    _, shapes = jax.eval_shape(run, params, cache, _row(feed, 0), jnp.int32(0))
    empty = jax.tree.map(lambda s: jnp.zeros((slots, *s.shape[1:]), s.dtype), shapes)

    def body(i: Array, carry: tuple[Cache, ForwardOutput]) -> tuple[Cache, ForwardOutput]:
        cache, out = carry
        slot = _row(order, i)[0]
        cache, row = run(params, cache, _row(feed, slot), slot)
        return cache, _put_row(out, row, slot)

    return jax.lax.fori_loop(0, live, body, (cache, empty))


def _run(
    plan: Plan, params: Params, cache: Cache, feed: Feed, first: Array | int
) -> tuple[Cache, ForwardOutput]:
    span = Span(first, feed.start, feed.count)
    cache, hidden = _decode(plan, params, cache, feed, span)
    return cache, ForwardOutput(head(params, plan.arch, hidden.last), hidden.features)


def _decode(
    plan: Plan,
    params: Params,
    cache: Cache,
    feed: Feed,
    span: Span,
    merged: Merged | None = None,
) -> tuple[Cache, Hidden]:
    common = params, plan.arch, cache, feed.tokens, span, plan.features
    return decode(*common, merged, plan.block)


def prefill(
    plan: Plan, params: Params, cache: Cache, feed: Feed, slot: Array
) -> tuple[Cache, ForwardOutput]:
    """One slot's chunk [1, chunk]; logits [1, 1, V] after its last real token only."""
    span = Span(slot, feed.start, feed.count)
    cache, hidden = _decode(plan, params, cache, feed, span)
    last = jax.lax.dynamic_slice_in_dim(hidden.last, feed.count[0] - 1, 1, 1)
    return cache, ForwardOutput(head(params, plan.arch, last), hidden.features)


def prefill_pictures(
    plan: Plan,
    params: Params,
    cache: Cache,
    feed: Feed,
    slot: Array,
    merged: Merged,
    reach: Array,
) -> tuple[Cache, ForwardOutput]:
    """`prefill` of a chunk [1, widest] with pictures. reach [1, widest]: the last position that
    each token sees on sliding layers."""
    span = Span(slot, feed.start, feed.count, reach)
    cache, hidden = _decode(plan, params, cache, feed, span, merged)
    last = jax.lax.dynamic_slice_in_dim(hidden.last, feed.count[0] - 1, 1, 1)
    return cache, ForwardOutput(head(params, plan.arch, last), hidden.features)


def choose(
    plan: Plan,
    needs_sampler: bool,
    logits: Array,
    rules: Rules,
    feed: Feed,
) -> Array:
    """[B, T] int32. needs_sampler False: every row is a bare argmax, which no program can get
    wrong."""
    if not needs_sampler:
        return sampling.choose_greedy(logits, rules.bias)
    if not plan.mapped:
        return sampling.choose(logits, *rules, feed.start)
    order, live = _live_first(feed)

    def body(i: Array, out: Array) -> Array:
        slot = _row(order, i)[0]
        own_logits, own_rules, start = _row((logits, rules, feed.start), slot)
        return _put_row(out, sampling.choose(own_logits, *own_rules, start), slot)

    return jax.lax.fori_loop(0, live, body, jnp.zeros(logits.shape[:2], jnp.int32))


def _live_first(feed: Feed) -> tuple[Array, Array]:
    """Slot numbers with the live ones first, and how many are live."""
    idle = feed.count == 0
    return jnp.argsort(idle, stable=True), jnp.sum(~idle)


def _row(tree: Tree, slot: Array | int) -> Tree:
    """One slot's of all [slots, ...]: [1, ...]."""
    cut = partial(jax.lax.dynamic_slice_in_dim, slice_size=1, allow_negative_indices=False)
    return jax.tree.map(lambda leaf: cut(leaf, slot), tree)


def _put_row(tree: Tree, row: Tree, slot: Array) -> Tree:
    """[slots, ...] with this slot's [1, ...]."""
    put = partial(jax.lax.dynamic_update_slice_in_dim, axis=0, allow_negative_indices=False)
    return jax.tree.map(lambda leaf, one: put(leaf, one, slot), tree, row)
