"""The target's keys and values as a drafter may read them: nothing is ever written through a view.

A drafter's layer attends to what one of the target's layers has cached, up to the last position
that is settled. Whatever the cache keeps (bfloat16, int8 with its scales, of `k_eq_v` layers the
values and the turning quarter of each key) is the target's affair: its own attention reads it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from specdec.core.types import Array
from targets.arch import Arch, LayerSpec
from targets.jax import cache as kv
from targets.jax.cache import Cache, Span
from targets.jax.kv_exchange import CacheExchange
from targets.jax.params import Params
from targets.layer_groups import place_of

KEY_NORM = "self_attn.k_norm"


class KVView(NamedTuple):
    """`KVExchange` of one query per slot that sees the cache up to position last [B], and is itself
    turned for the position `ahead` of that. Sliding layers see `window` keys back from `last`.
    block: as in `CacheExchange`."""

    last: Array
    ahead: int
    block: int | None = None

    def scope(self) -> KVView:
        return self

    def positions(self, tokens: int) -> Array:
        assert tokens == 1, "a view has no order among queries of its own"
        return self.last[:, None] + self.ahead

    def exchange(self, stored: Any, repeat: Any, layer: LayerSpec, k: Array, v: Array) -> Any:
        raise AssertionError("a layer that reads the target's cache has no keys of its own")

    def recall(self, stored: kv.LayerCache, repeat: int) -> tuple[kv.LayerCache, int]:
        return stored, repeat

    def attend(self, q: Array, seen: Any, layer: LayerSpec, key_norm: Array | None) -> Array:
        """q [B, 1, N, D] -> [B, 1, N * D]. Where a mesh caches more copies of a head than there are
        queries (`cache.cached_heads`), the queries are copied too."""
        copies = max(1, kv.heads(seen[0].v) // layer.heads)
        exchange = CacheExchange(Span(0, self.last, jnp.ones_like(self.last)), self.block)
        mixed = exchange.attend(jnp.repeat(q, copies, 2), seen, layer, key_norm)
        each = mixed.reshape(*q.shape[:2], layer.heads, copies, layer.head_dim)
        return each[:, :, :, 0].reshape(*q.shape[:2], -1)


def entries_of(arch: Arch, cache: Cache, layer: int) -> tuple[kv.LayerCache, int]:
    """What `KVView.attend` takes of the target's layer of this number; it must own its K/V."""
    group, position, repeat = place_of(arch, layer)
    stored = cache.layers[group][position]
    assert stored is not None, f"layer {layer} has no keys and values of its own"
    return stored, repeat


def key_norm_of(arch: Arch, params: Params, layer: int) -> Array:
    """The weight [D] of that layer's key norm, of which `k_eq_v` keys are made."""
    group, position, repeat = place_of(arch, layer)
    return params.segments[group][position][KEY_NORM][repeat]
