"""Where a forward pass's keys and values go to and come from.

A layer hands its new K/V to a `KVExchange` and gets back all that its queries may be compared with.
`CacheExchange` decodes, `SequenceExchange` takes whole sequences (training, teacher, scoring);
`training/blocks.py` has one more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from specdec.core.types import Array
from targets.arch import Arch, LayerSpec
from targets.jax import cache as kv, layers
from targets.jax.cache import Span
from targets.jax.params import Params
from targets.layer_groups import LayerGroup, layer_groups

BLOCK = 4096
"""Entries of a global layer's cache that attention reads at a time, as far as the longest row is
filled. A cache of no more than this is read whole."""
MAPPED_BLOCK = 512
"""The same on CPUs (`Plan.mapped`), where a round of the loop costs little and an entry costs much:
the first token of a short prompt comes in a third of the time."""
FILLED = "filled_blocks"
"""What the loop over them is called in a compiled program."""
AT_ONCE = 2**26
"""Bytes of keys that attention takes at a time: they and the values, over four chips, are a
quarter of a TPU v6e's 128 MiB on the chip."""


class KVExchange(Protocol):
    """Where K/V go to and come from during one forward pass."""

    def scope(self) -> KVExchange:
        """The same, for the layers that are traced together: what they share is computed once."""
        ...

    def positions(self, tokens: int) -> Array:
        """Absolute positions [B, T] (or [1, T]) of a call with T tokens."""
        ...

    def exchange(
        self, stored: Any, repeat: Array | int, layer: LayerSpec, k: Array, v: Array
    ) -> tuple[Any, Any]:
        """Store the new k, v [B, T, K, D]; return the updated store and the layer's keys and
        values, in whatever form `attend` takes them."""
        ...

    def recall(self, stored: Any, repeat: int) -> Any:
        """The keys and values of a donor layer, for `attend`."""
        ...

    def attend(self, q: Array, seen: Any, layer: LayerSpec, key_norm: Array | None) -> Array:
        """Queries [B, T, N, D] over what `exchange` or `recall` gave -> [B, T, N * D]. key_norm
        [D]: the weight of the layer's key norm, for a memory that keeps no whole keys."""
        ...


class CacheExchange:
    """Decoding: write into the cache, then attend over the cache alone, so that the order of
    each reduction follows entries (absolute positions), never how many rows a call has."""

    def __init__(self, span: Span, block: int | None = None) -> None:
        """block: entries of a long cache that are read at a time, by default BLOCK."""
        self.span, self.block = span, block or BLOCK
        self._known: dict[tuple[Any, ...], Any] = {}

    def scope(self) -> CacheExchange:
        return CacheExchange(self.span, self.block)

    def _once(self, make: Callable[..., Any], *sizes: Any) -> Any:
        """make(span, *sizes): XLA would find that layers compute the same, but each operation that
        is traced takes time first."""
        if (make, *sizes) not in self._known:
            self._known[make, *sizes] = make(self.span, *sizes)
        return self._known[make, *sizes]

    def positions(self, tokens: int) -> Array:
        return self.span.start[:, None] + jnp.arange(tokens)

    def exchange(self, stored, repeat, layer, k, v):
        copies = kv.heads(stored.k) // layer.kv_heads  # see cache.cached_heads
        k = layers.rotating(k, layer.rope) if layer.k_eq_v else k  # see cache.key_dims
        if copies > 1:
            k, v = (jnp.repeat(new, copies, 2) for new in (k, v))
        places = self._once(kv.places, k.shape[1], kv.size(stored.v))
        stored = kv.LayerCache(
            kv.write(stored.k, repeat, places, k), kv.write(stored.v, repeat, places, v)
        )
        return stored, self.recall(stored, repeat)

    def recall(self, stored, repeat):
        return stored, repeat

    def attend(self, q, seen, layer, key_norm):
        """A few rows at a time where their entries are many: XLA copies what it slices from the
        cache, within the chip where it fits, else through memory."""
        (stored, repeat), rows = seen, q.shape[0]
        some = _rows_at_once(rows, stored.v, self.block)
        parts = layers.queries_in_parts(q, layer, key_norm) if layer.k_eq_v else (q,)

        def part(first: Array) -> Array:
            def cut(x: Array) -> Array:
                return jax.lax.dynamic_slice_in_dim(x, first, some)

            reach = None if self.span.reach is None else cut(self.span.reach)
            span = Span(self.span.first + first, cut(self.span.start), cut(self.span.count), reach)
            own = CacheExchange(span, self.block)
            return own._attend(tuple(map(cut, parts)), stored, repeat, layer.window)

        if some == rows:
            return self._attend(parts, stored, repeat, layer.window)
        return jax.lax.map(part, jnp.arange(0, rows, some)).reshape(rows, q.shape[1], -1)

    def _attend(
        self, q: layers.Parts, stored: kv.LayerCache, repeat: Array | int, window: int | None
    ) -> Array:
        """Queries over the whole of a short cache or a ring, and over the filled blocks of a long
        one. Values that keys are made of are barred from being read twice: XLA would."""
        span, size, tokens = self.span, kv.size(stored.v), q[0].shape[1]
        each = self.block

        def cut(begin: Array | int, count: int) -> tuple[layers.Parts, kv.Entries]:
            k, v = (kv.read(half, repeat, span, begin, count) for half in stored)
            if len(q) == 1:
                return (k,), v
            v = jax.lax.optimization_barrier(v)
            return (k, v), v

        def block(i: Array) -> tuple[layers.Parts, kv.Entries, Array]:
            begin = jnp.minimum(i * each, size - each)  # the last block reaches back: not twice
            entries = begin + jnp.arange(each)
            seen = kv.visible(span, tokens, entries, size, window)
            return *cut(begin, each), seen & (entries >= i * each)

        if window is not None or size <= each:
            return layers.attend_parts(q, *cut(0, size), self._once(_seen, tokens, size, window))
        filled = jnp.maximum((span.start + span.count).max(), 1)
        with jax.named_scope(FILLED):
            return layers.attend_blocks(q, block, -(-filled // each))


def _seen(span: Span, tokens: int, size: int, window: int | None) -> Array:
    """`visible` of a whole cache."""
    return kv.visible(span, tokens, jnp.arange(size), size, window)


def _rows_at_once(rows: int, cache: kv.Entries, block: int) -> int:
    """The largest divisor of `rows` for which one layer's entries, of which `block` are read at a
    time, stay within AT_ONCE."""
    leaves = jax.tree.leaves(cache)
    row = sum(math.prod(x.shape[2:]) * x.dtype.itemsize for x in leaves)
    row = row * min(kv.size(cache), block) // kv.size(cache)
    return next(n for n in range(rows, 0, -1) if rows % n == 0 and (n == 1 or n * row <= AT_ONCE))


def attend_visible(
    exchange: Any, q: Array, seen: tuple[Array, Array], layer: LayerSpec, key_norm: Array | None
) -> Array:
    """`attend` for training: over whole keys and values, masked by `visible`."""
    k, v = seen
    return layers.attend(q, k, v, exchange.visible(layer, q.shape[1], k.shape[1]))


class SequenceExchange(NamedTuple):
    """Training: whole sequences from position 0, no cache. The store keeps each layer's own K/V
    for the layers that share it: pairs [repeats, B, T, K, D], filled repeat by repeat."""

    def scope(self):
        return self

    def positions(self, tokens: int) -> Array:
        return jnp.arange(tokens)[None]

    def exchange(self, stored, repeat, layer, k, v):
        if stored is None:  # no other layer shares this one's K/V: keep nothing
            return None, (k, v)
        stored = kv.LayerCache(stored.k.at[repeat].set(k), stored.v.at[repeat].set(v))
        return stored, (k, v)

    def recall(self, stored, repeat):
        return stored.k[repeat], stored.v[repeat]

    attend = attend_visible

    def visible(self, layer: LayerSpec, tokens: int, size: int) -> Array:
        """[1, T, S]."""
        ahead = jnp.arange(tokens)[:, None] - jnp.arange(size)
        seen = ahead >= 0
        return (seen if layer.window is None else seen & (ahead < layer.window))[None]


def shared_stores(
    params: Params,
    arch: Arch,
    rows: Callable[[LayerSpec], tuple[int, ...]],
    lenders: tuple[int, ...] = (),
) -> tuple:
    """Room for the K/V of layers that others share, or a draft head reads (lenders), None for the
    rest (training memories).

    rows: the leading shape [B, S] of what one layer keeps.
    """
    donors = {layer.kv_from for layer in arch.layers} | {*lenders}
    dtype = params.top["norm"].dtype

    def store(group: LayerGroup, j: int, layer: LayerSpec) -> kv.LayerCache | None:
        if not donors & {group.layer(g, j) for g in range(group.repeats)}:
            return None
        shape = (group.repeats, *rows(layer), layer.kv_heads, layer.head_dim)
        return kv.LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    return tuple(
        tuple(store(group, j, layer) for j, layer in enumerate(group.pattern))
        for group in layer_groups(arch)
    )
