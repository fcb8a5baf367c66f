"""What a decode step must read, and how fast this device reads."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp

from specdec.types import Array
from targets.jax.params import Params
from targets.jax.target import JaxTarget


def weight_bytes(params: Params) -> int:
    """Bytes of weights that one step reads: all but the per-layer table, of which it reads rows."""
    leaves = jax.tree.leaves(params)
    table = params.top.get("embed_tokens_per_layer")
    return sum(leaf.nbytes for leaf in leaves) - (0 if table is None else table.nbytes)


def cache_bytes(target: JaxTarget, batch: int, context: int) -> int:
    """Bytes of filled K/V entries that a step of `batch` rows at this context must read."""
    arch, item = target.plan.arch, jnp.dtype(target.dtype).itemsize
    total = 0
    for layer in arch.layers:
        seen = min(context, layer.window or context)
        total += 2 * seen * layer.kv_heads * layer.head_dim * item
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
