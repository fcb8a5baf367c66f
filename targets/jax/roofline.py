"""What a decode step must read, and how fast this device reads."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp

from specdec.core.types import Array
from targets.arch import Arch
from targets.jax.cache import key_dims
from targets.jax.params import Params, bytes_of
from targets.layer_groups import layer_groups


def weight_bytes(params: Params, arch: Arch, rows: int) -> int:
    """Bytes of weights (arrays, or their shapes) that one step of this many rows must read. Tables
    that are only looked up count as nothing; experts as those that rows with independent, even
    routing pick on average."""
    tables = {"embed_tokens", "embed_tokens_per_layer"} - {arch.head}
    total = _bytes(params) - sum(_bytes(params.top.get(name)) for name in tables)
    for pattern, group in zip(params.segments, layer_groups(arch), strict=True):
        for weights, layer in zip(pattern, group.pattern, strict=True):
            if layer.moe is not None:
                idle = (1 - layer.moe.top_k / layer.moe.experts) ** rows
                experts = [weights["experts.gate_up_proj"], weights["experts.down_proj"]]
                total -= int(idle * _bytes(experts))
    return total


def _bytes(tree: Any) -> int:
    return sum(bytes_of(leaf.dtype, leaf.size) for leaf in jax.tree.leaves(tree))


def cache_bytes(arch: Arch, dtype: Any, batch: int, context: int) -> int:
    """Bytes of filled K/V entries that a step of `batch` rows at this context must read."""
    total, scale = 0, jnp.dtype(jnp.float32).itemsize if dtype == jnp.int8 else 0
    for layer in arch.layers:
        seen = min(context, layer.window or context)
        dims = key_dims(layer) + layer.head_dim
        total += seen * layer.kv_heads * (dims * jnp.dtype(dtype).itemsize + 2 * scale)
    return batch * total


def read_bandwidth(size: int | None = None) -> float:
    """Bytes per second of summing one large array, the best of ten."""
    size = size or (2**28 if jax.default_backend() == "cpu" else 2**33)
    block = jnp.ones((size // 4 // 1024, 1024), jnp.float32)

    @jax.jit
    def total(values: Array) -> Array:
        return values.sum()

    total(block).block_until_ready()
    best = float("inf")
    for _ in range(10):
        started = time.perf_counter()
        total(block).block_until_ready()
        best = min(best, time.perf_counter() - started)
    return size / best
