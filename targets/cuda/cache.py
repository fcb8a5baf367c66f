"""The KV cache on one device, in the layout that the kernels read; rings for sliding layers.

A position p lives in entry p mod S, always: on global layers S exceeds every position, on sliding
ones S >= window + slack, so that what a rejected draft overwrote had already left the window. An
entry is valid iff its position is below the sequence's length: the length is the rollback.

Shape legend: S entries (a multiple of CHUNK), K kv heads, D head_dim, D' = D padded to 64s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.core.pages import PagePlan, Pages
from specdec.core.types import MAX_DRAFT
from targets.arch import Arch, LayerSpec
from targets.cuda.mapped import MappedPages

CHUNK = 128
"""Entries come in multiples of this: attention takes keys in whole chunks, at absolute positions,
which is what fixes a row's order of reduction."""
HEAD_ALIGN = 64
"""Cached heads are padded to a multiple of this."""
LANES = 32
"""V is transposed within blocks of this many entries, so that a warp reads them coalesced."""
FP8_MAX = 448.0


@dataclass(frozen=True)
class LayerCache:
    """k [slots, K, S, D'], v [slots, K, S / 32, D', 32], in one dtype (FP8 without a scale: keys
    and values are normed)."""

    k: Tensor
    v: Tensor
    size: int
    head_dim: int


@dataclass(frozen=True)
class KVCache:
    """layers[i]: None where layer i shares another's K/V."""

    layers: tuple[LayerCache | None, ...]
    tokens: Tensor
    """[slots, positions] int32: what was fed at each position, valid below each length like
    K/V."""

    def of(self, layers: tuple[LayerSpec, ...], i: int) -> LayerCache:
        """Layer i's own cache, or its donor's."""
        donor = layers[i].kv_from
        cache = self.layers[i if donor is None else donor]
        assert cache is not None, f"layer {i} has no K/V to read"
        return cache


def remember(texts: Tensor, tokens: Tensor, start: Tensor, slot: Tensor) -> None:
    """Put tokens [B, T] into texts [slots, positions] from start [B] on. All rows run."""
    place = start[:, None].long() + torch.arange(tokens.shape[1], device=tokens.device)
    texts[slot[:, None].long(), place] = tokens


def padded_head(head_dim: int) -> int:
    """D'."""
    return -(-head_dim // HEAD_ALIGN) * HEAD_ALIGN


def slack_of(chunk: int, short: int) -> int:
    """Extra cache entries, so that no call overwrites what its own queries still see: the most
    rows that one call feeds to a sequence, a verify or a prefill chunk of up to `short` tokens."""
    return max(MAX_DRAFT + 1, min(chunk, short))


def entries(layer: LayerSpec, max_len: int, slack: int, first: int = 0) -> int:
    """Cache entries S of a layer. first: rows that a sequence's first call may feed, which
    overwrites nothing as long as it is not longer than S."""
    needed = max(min(layer.window or max_len, max_len) + slack, first)
    return -(-needed // CHUNK) * CHUNK


def make_cache(
    arch: Arch,
    slots: int,
    max_len: int,
    slack: int,
    dtype: torch.dtype,
    device: str,
    first: int = 0,
    pages: Pages | None = None,
) -> KVCache:
    """Zeros. slack: the most rows that one call through the cache feeds to a sequence; first: the
    most that its first call feeds. pages: of the global layers, from `make_pages`."""
    own = [layer for layer in arch.layers if layer.kv_from is None]
    sizes = [entries(layer, max_len, slack, first) for layer in own]
    paged = isinstance(pages, MappedPages)
    if paged:
        whole = pages.plan.most * pages.plan.page
        sizes = [size if layer.window else whole for size, layer in zip(sizes, own, strict=True)]
    shapes = [_shapes(layer, slots, size) for layer, size in zip(own, sizes, strict=True)]
    growing = [
        shape for both, layer in zip(shapes, own, strict=True) if not layer.window for shape in both
    ]
    mapped = iter(pages.tensors(growing, dtype) if paged else ())

    def made(layer: LayerSpec, shape: tuple[int, ...]) -> Tensor:
        if paged and not layer.window:
            return next(mapped)
        return torch.zeros(shape, dtype=dtype, device=device)

    parts = zip(own, sizes, shapes, strict=True)
    caches = iter(
        [
            LayerCache(made(layer, k), made(layer, v), size, layer.head_dim)
            for layer, size, (k, v) in parts
        ]
    )
    tokens = torch.zeros((slots, max(max_len + slack, first)), dtype=torch.int32, device=device)
    layers = (None if layer.kv_from is not None else next(caches) for layer in arch.layers)
    return KVCache(tuple(layers), tokens)


def _shapes(layer: LayerSpec, slots: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of `LayerCache`'s k and v."""
    heads, padded = (slots, layer.kv_heads), padded_head(layer.head_dim)
    return (*heads, size, padded), (*heads, size // LANES, padded, LANES)


def make_pages(plan: PagePlan | None, slots: int, device: torch.device) -> Pages | None:
    """None: each slot has room for the longest text."""
    if plan is None:
        return None
    return MappedPages(plan, slots, device) if plan.mapped else Pages(plan, slots)


def stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to the cache's dtype. FP8 saturates: a bare convert would turn large into NaN."""
    if dtype == torch.float8_e4m3fn:
        values = values.clamp(-FP8_MAX, FP8_MAX)
    return values.to(dtype)


def write(cache: LayerCache, slot: int, start: int, k: Tensor, v: Tensor) -> None:
    """New k, v [T, K, D] at positions start .. start + T - 1 of one slot."""
    entry = torch.arange(start, start + len(k), device=k.device) % cache.size
    keys, values = _bits(cache.k)[slot], _bits(cache.v)[slot]
    keys[:, entry, : cache.head_dim] = _bits(stored(k, cache.k.dtype)).transpose(0, 1)
    values[:, entry // LANES, : cache.head_dim, entry % LANES] = _bits(stored(v, cache.v.dtype))


def read(cache: LayerCache, slot: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """k, v [K, stop - start, D] of these positions' entries, whatever they hold."""
    entry = torch.arange(start, stop, device=cache.k.device) % cache.size
    k = _bits(cache.k)[slot][:, entry, : cache.head_dim]
    v = _bits(cache.v)[slot][:, entry // LANES, : cache.head_dim, entry % LANES]
    return k.view(cache.k.dtype), v.transpose(0, 1).contiguous().view(cache.v.dtype)


def _bits(values: Tensor) -> Tensor:
    """FP8 as bytes: torch can't index e4m3 everywhere."""
    return values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values
