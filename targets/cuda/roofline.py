"""What a decode step must read, how fast this GPU reads, and how long its forward takes there.

Counted from the architecture, not from what the device holds: padding and copies are our own cost
and belong into the time, not into the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from math import prod

from specdec.core.errors import UserError
from targets.arch import Arch, MoeSpec
from targets.cuda.certified import MOST_ROWS
from targets.cuda.device import free_bytes
from targets.cuda.footprint import ALIKE, KV, WIDE, codes_bytes, tensor_bytes
from targets.routing import experts_picked
from targets.tensors import all_tensors

TABLES = ("embed_tokens", "embed_tokens_per_layer")
"""Only looked up; but the one that is `Arch.head` is read whole, or its codes are."""
GROUPS = 10
"""Timed groups of back-to-back forwards."""
REPLAYS = 8
"""Forwards per group: a group hides the clock's own resolution."""
STREAM_BYTES = 2**34
"""Bytes that a GPU reads to measure its bandwidth."""
CPU_BLOCK_BYTES = 2**26
"""The same on a CPU."""


def weight_bytes(
    arch: Arch,
    dtype: str,
    rows: int,
    expected: bool = True,
    own: Mapping[str, str] = ALIKE,
    correlation: float = 0.0,
) -> int:
    """Bytes of weights that a step of this many rows must read.

    Of the experts: with `expected`, those that rows with independent, even routing pick on average;
    without, the most that they can pick. Of lookup tables: a row for each row. own: dtypes of
    tensors that have another. correlation: how far rows' picks agree (`targets.routing`).
    """
    total = 0.0
    for name, spec in all_tensors(arch).items():
        size = tensor_bytes(name, spec, own.get(name, dtype))
        layer = name.split(".")
        if name == arch.head:
            narrow = codes_bytes(arch, dtype) if rows <= MOST_ROWS else 0
            size = narrow or size  # and a few candidates
        elif name in TABLES:
            size = 0 if name == "embed_tokens" else rows * spec.shape[1] * WIDE[dtype]
        elif "experts" in layer:
            moe = arch.layers[int(layer[1])].moe
            assert moe is not None
            size *= expert_share(moe, rows, expected, correlation)
        total += size
    return int(total) + rows * arch.hidden * WIDE[dtype]  # and the rows' embeddings


def expert_share(moe: MoeSpec, rows: int, expected: bool = True, correlation: float = 0.0) -> float:
    """Share of the experts that `rows` rows pick: on average, or at most."""
    if not expected:
        return min(1.0, rows * moe.top_k / moe.experts)
    return experts_picked(moe, rows, correlation) / moe.experts


def cache_bytes(arch: Arch, kv: str, batch: int, context: int) -> int:
    """Bytes of K/V entries that a step of `batch` sequences at this context must read: no more
    than the window of sliding layers, and again for each layer that shares another's."""
    total = 0
    for layer in arch.layers:
        seen = min(context, layer.window or context)
        total += prod((2, seen, layer.kv_heads, layer.head_dim, KV[kv]))
    return batch * total


def read_bandwidth(device: str) -> float:
    """Bytes per second: the device's read-only stream, or the references' own on a CPU."""
    if device != "cpu":
        return _stream()
    import torch

    block = torch.ones(CPU_BLOCK_BYTES // 4)
    return CPU_BLOCK_BYTES / min(_seconds(block.sum) for _ in range(10))


def _stream() -> float:
    """The read-only stream over what memory the model leaves: far more than any cache holds."""
    import torch

    from targets.cuda.bandwidth import stream_bandwidth

    torch.cuda.empty_cache()
    size = min(STREAM_BYTES, free_bytes() // 2 >> 30 << 30)
    if not size:
        raise UserError("no 2 GiB are free to measure the read bandwidth: use fewer --batches")
    bandwidth = stream_bandwidth(size)
    torch.cuda.empty_cache()
    return bandwidth


def forward_samples(forward: Callable[[], object], device: str) -> list[float]:
    """Seconds per forward, its device time alone: launched as one graph, many in a row."""
    if device == "cpu":
        return [_seconds(forward) for _ in range(GROUPS)]
    import torch

    from targets.cuda.graphs import Captured, GraphPool

    replay = Captured(forward, GraphPool(torch.device(device))).replay
    for _ in range(REPLAYS):  # warm
        replay()
    samples = []
    for _ in range(GROUPS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPLAYS):
            replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / 1000 / REPLAYS)
    return samples


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started
