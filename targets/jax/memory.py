"""Where a forward pass's keys and values go to and come from.

A layer hands its new K/V to a `Memory` and gets back all that its queries may be compared with.
`CacheMemory` decodes, `SequenceMemory` takes whole sequences (training, teacher, scoring);
`training/blocks.py` has one more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp

from specdec.types import Array
from targets.arch import Arch, LayerSpec
from targets.jax import cache as kv
from targets.jax.cache import Span
from targets.jax.params import Params
from targets.segments import Segment, segments


class Memory(Protocol):
    """Where K/V go to and come from during one forward pass."""

    def positions(self, tokens: int) -> Array:
        """Absolute positions [B, T] (or [1, T]) of a call with T tokens."""
        ...

    def exchange(
        self, stored: Any, group: Array | int, layer: LayerSpec, k: Array, v: Array
    ) -> tuple[Any, Array, Array]:
        """Store the new k, v [B, T, K, D]; return the updated store and all keys and values."""
        ...

    def recall(self, stored: Any, group: int) -> tuple[Array, Array]:
        """All keys and values of a donor layer."""
        ...

    def visible(self, layer: LayerSpec, tokens: int, size: int) -> Array:
        """[B, T, S]."""
        ...


class CacheMemory(NamedTuple):
    """Decoding: write into the cache, then attend over the cache alone, so that the order of
    each reduction follows entries (absolute positions), never how many rows a call has."""

    span: Span

    def positions(self, tokens: int) -> Array:
        return self.span.start[:, None] + jnp.arange(tokens)

    def exchange(self, stored, group, layer, k, v):
        copies = stored.k.shape[3] // layer.kv_heads  # see cache.cached_heads
        k, v = (jnp.repeat(new, copies, 2) for new in (k, v))
        stored = kv.LayerCache(
            kv.write(stored.k, group, self.span, k), kv.write(stored.v, group, self.span, v)
        )
        return stored, *self.recall(stored, group)

    def recall(self, stored, group):
        return kv.read(stored.k, group, self.span), kv.read(stored.v, group, self.span)

    def visible(self, layer, tokens, size):
        return kv.visible(self.span, tokens, size, layer.window)


class SequenceMemory(NamedTuple):
    """Training: whole sequences from position 0, no cache. The store keeps each layer's own K/V
    for the layers that share it: pairs [repeats, B, T, K, D], filled group by group."""

    def positions(self, tokens: int) -> Array:
        return jnp.arange(tokens)[None]

    def exchange(self, stored, group, layer, k, v):
        if stored is None:  # nobody shares this layer's K/V: keep nothing
            return None, k, v
        stored = kv.LayerCache(stored.k.at[group].set(k), stored.v.at[group].set(v))
        return stored, k, v

    def recall(self, stored, group):
        return stored.k[group], stored.v[group]

    def visible(self, layer, tokens, size):
        ahead = jnp.arange(tokens)[:, None] - jnp.arange(size)
        seen = ahead >= 0
        return (seen if layer.window is None else seen & (ahead < layer.window))[None]


def shared_stores(
    params: Params, arch: Arch, rows: Callable[[LayerSpec], tuple[int, ...]]
) -> tuple:
    """Room for the K/V of layers that others share, None for the rest (training memories).

    rows: the leading shape [B, S] of what one layer keeps.
    """
    donors = {layer.kv_from for layer in arch.layers}
    dtype = params.top["norm"].dtype

    def store(segment: Segment, j: int, layer: LayerSpec) -> kv.LayerCache | None:
        if not donors & {segment.layer(g, j) for g in range(segment.repeats)}:
            return None
        shape = (segment.repeats, *rows(layer), layer.kv_heads, layer.head_dim)
        return kv.LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    return tuple(
        tuple(store(segment, j, layer) for j, layer in enumerate(segment.pattern))
        for segment in segments(arch)
    )
