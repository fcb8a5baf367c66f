"""What a decode step must read, and how fast this device reads."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp

from specdec.types import Array
from targets.jax.target import JaxTarget
from targets.segments import segments


def weight_bytes(target: JaxTarget, rows: int) -> int:
    """Bytes of weights that one step of this many rows must read: of the per-layer table only
    rows (nothing, that is), of the experts no more than the rows can pick."""
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(target.params))
    table = target.params.top.get("embed_tokens_per_layer")
    total -= 0 if table is None else table.nbytes
    for pattern, segment in zip(target.params.segments, segments(target.plan.arch), strict=True):
        for weights, layer in zip(pattern, segment.pattern, strict=True):
            if layer.moe is not None:
                idle = 1 - min(1.0, rows * layer.moe.top_k / layer.moe.experts)
                experts = [weights["experts.gate_up_proj"], weights["experts.down_proj"]]
                total -= int(idle * sum(leaf.nbytes for leaf in jax.tree.leaves(experts)))
    return total


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
