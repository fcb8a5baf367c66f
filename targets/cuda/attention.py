"""Split-KV attention as launches of our kernels: a part of `Kernels`.

Few rows: `prepare`, `split` (a CTA per lane of chunks) and `combine`; very few go without
`prepare`. Enough of them to keep the machine busy: `walk` alone. All do the same arithmetic
(kernels/attention.cuh).
"""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from targets.arch import Arch, LayerSpec, Rope
from targets.cuda import tiles
from targets.cuda.cache import CHUNK
from targets.cuda.formulas import inverse_frequencies
from targets.cuda.inputs import Input, make_input, make_rows
from targets.cuda.launch import SHARED_LIMIT, Launcher, Variant, address
from targets.cuda.ops import AttentionLayer, Rows

THREADS = 256
HEADS = (64, 128, 256, 512)
"""What head_dim is padded to: there are kernels for each."""
TILES = (1, 2, 4)
"""Tiles of 8 query rows per CTA."""
WIDE, WIDE_TILES = 512, 2
"""Head size for which `walk` has registers for so many tiles only."""
LANES = 16
"""Lanes, to which chunks of keys are dealt by absolute position (attention.cuh)."""
SHORT_CHUNK = 64
"""Keys per chunk where it is not `CHUNK`: for heads of `WIDE`, because registers hold no more, and
for windows that then fit into half of the lanes, because their keys are dealt to twice as many
CTAs. With a window that needs all lanes, one lane would have two chunks, one after the other
(docs/performance.md)."""
STAGE, FEWEST = 64, 3
"""Keys per stage of `walk`'s ring; stages with which it still keeps memory busy."""
WALK_FROM = 128
"""CTAs that are enough for the machine when each does all lanes."""
ALONE_VECTORS, ALONE_WIDE, MOST_WIDE = 32, 24, 48
"""Largest number of vectors per CTA (queries, new keys and values) that `split` computes itself, in
a few rounds of its warps; with more, launching `prepare` first is faster. The second number is for
heads of `WIDE`, the third for heads of `WIDE` where `prepare` would have more than `MANY_PREPARED`
CTAs."""
MANY_PREPARED = 24
SINGLY, TOGETHER, TOGETHER_WIDE = 12, 2, 4
"""Up to `SINGLY` of these vectors, each of a CTA's eight warps computes one at a time; with more,
two at a time (heads of `WIDE`: four), which takes longer."""
PAIRED = 256, 2
"""Largest head size and tiles with which two CTAs of `split` fit on a multiprocessor at once."""
BESIDE = 32
"""CTAs of `prepare` that fit beside a projection's, on the few multiprocessors that it leaves free:
more of them would run one after the other there."""
STORED_APART = 16
"""Tokens per sequence from which a kernel of its own stores their keys and values: attention
otherwise does it in every CTA that sees them."""


class _AttentionJob(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "q_norm", "k_norm", "cosine", "sine", "k", "v")),
        *((name, c_void_p) for name in ("start", "slot", "x", "q", "partial", "sums")),
        *((name, c_int) for name in ("stride", "batch", "tokens", "group", "kv_heads")),
        *((name, c_int) for name in ("entries", "window", "own", "k_eq_v")),
        *((name, c_int) for name in ("stores", "stages", "rows")),
        *((name, c_int) for name in ("fp8", "k_blocks", "block", "k_groups")),
        ("eps", c_float),
    )


class _Heads(NamedTuple):
    """Compile-time constants of a layer: head_dim, keys of a chunk, whether heads are normed. The
    number of query heads per KV head is passed at run time: compiled in, it costs 0.6 % with
    several tokens (docs/performance.md)."""

    dim: int
    chunk: int
    normed: bool

    @property
    def padded(self) -> int:
        return _padded(self.dim)


def variants(arch: Arch, kv8: int) -> set[Variant]:
    """kv8: whether the cache is e4m3."""
    kinds = {_heads(layer) for layer in arch.layers}
    splits = {
        _variant("attention_split", heads, kv8, high, together)
        for heads in kinds
        for high in TILES
        for together in (1, _together(heads.padded))
    }
    walks = {
        _variant("attention_fused", heads, kv8, high)
        for heads in kinds
        for high in TILES
        if high <= _most_walking(heads.padded)
    }
    files = "attention_prepare", "attention_combine"
    return splits | walks | {_variant(file, heads, kv8) for file in files for heads in kinds}


class Attention:
    """For one architecture with up to this many positions."""

    def __init__(
        self,
        launch: Launcher,
        arch: Arch,
        positions: int,
        kv8: int,
        device: torch.device,
        processors: int,
    ) -> None:
        self._launch, self._kv8 = launch, kv8
        self._eps, self._device, self._processors = arch.eps, device, processors
        self._rope = {
            (layer.rope, layer.head_dim): _rope_tables(
                layer.rope, layer.head_dim, positions, device
            )
            for layer in {layer.rope: layer for layer in arch.layers}.values()
        }

    def run(self, qkv: Tensor, given: AttentionLayer, rows: Rows, kind: str) -> Input:
        """`Ops.attention`. For "w8a8": rows of f16 (value / 32) that are not quantised yet, as an
        input with block 0."""
        (batch, tokens), layer = rows.tokens.shape, given.spec
        size = batch * tokens, layer.heads * layer.head_dim
        x = (
            make_rows(*size, self._device)
            if kind == "w8a8"
            else make_input(*size, self._device, tiles.EIGHTHS)
        )
        heads, queries = batch * layer.kv_heads, tokens * layer.heads // layer.kv_heads
        dim = _padded(layer.head_dim)
        high = _high(queries, _most_walking(dim))
        if heads * _shares(queries, high) >= WALK_FROM:
            self._walk(self._job(qkv, given, rows, x, kind), layer, batch, high)
            return x
        high = _spread(layer, batch, tokens, self._processors)
        vectors = min(queries, 8 * high) + 2 * tokens
        per_row = layer.heads + (2 * layer.kv_heads if layer.kv_from is None else 0)
        alone = vectors <= _most_alone(dim, batch * tokens * _parts(per_row))

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, device=self._device)

        # q has 16-bit values, two per float; lanes first: those of a short context share pages
        q = None if alone else new(heads, _shares(queries, high), dim // 2, _filled(high))
        room = q, new(LANES, heads, queries, dim), new(LANES, heads, queries, 2)
        job = self._job(qkv, given, rows, x, kind, room)
        job.rows = 8 * high
        if not alone:
            self._prepare(job, layer, per_row)
        self._split(job, layer, batch, high, _together(dim) if alone and vectors > SINGLY else 1)
        return x

    def store(self, qkv: Tensor, layer: AttentionLayer, rows: Rows) -> None:
        """`Ops.store`."""
        job = self._job(qkv, layer, rows, None, "")
        self._prepare(job, layer.spec, 2 * layer.spec.kv_heads)

    def _job(
        self,
        qkv: Tensor,
        given: AttentionLayer,
        rows: Rows,
        x: Input | None,
        kind: str,
        room: tuple[Tensor | None, ...] = (None, None, None),
    ) -> _AttentionJob:
        """room: for queries, partial outputs and their sums."""
        (batch, tokens), layer, cache = rows.tokens.shape, given.spec, given.cache
        cosine, sine = (part[given.ahead :] for part in self._rope[layer.rope, layer.head_dim])
        k_blocks, block, k_groups = (x.k_blocks, x.block, x.k_groups) if x else (0, 0, 1)
        q, partial, sums = room
        own = layer.kv_from is None
        return _AttentionJob(
            qkv=address(qkv),
            q_norm=address(given.q_norm),
            k_norm=address(given.k_norm),
            cosine=address(cosine),
            sine=address(sine),
            k=address(cache.k),
            v=address(cache.v),
            start=address(rows.start),
            slot=address(rows.slot),
            x=address(x and x.data),
            q=address(q),
            partial=address(partial),
            sums=address(sums),
            stride=qkv.stride(0),
            batch=batch,
            tokens=tokens,
            group=layer.heads // layer.kv_heads,
            kv_heads=layer.kv_heads,
            entries=cache.size,
            window=layer.window or 0,
            own=int(own),
            k_eq_v=int(layer.k_eq_v),
            stores=int(own and tokens <= STORED_APART),
            stages=0,
            rows=0,
            fp8=int(kind != "bf16"),
            k_blocks=k_blocks,
            block=block,
            k_groups=k_groups,
            eps=self._eps,
        )

    def _walk(self, job: _AttentionJob, layer: LayerSpec, batch: int, high: int) -> None:
        heads = _heads(layer)
        if job.own and not job.stores:
            self._prepare(job, layer, 2 * layer.kv_heads)
        job.stages, shared = _ring(heads, high, self._kv8)
        grid = (_shares(job.tokens * job.group, high), layer.kv_heads, batch)
        variant = _variant("attention_fused", heads, self._kv8, high)
        self._launch(variant, "walk", grid, THREADS + 32, [job], shared)

    def _split(
        self, job: _AttentionJob, layer: LayerSpec, batch: int, high: int, together: int
    ) -> None:
        """together: vectors that a warp makes at a time."""
        heads = _heads(layer)
        grid = (_shares(job.tokens * job.group, high) * LANES, layer.kv_heads, batch)
        variant = _variant("attention_split", heads, self._kv8, high, together)
        room = _room_together(heads.padded, job.tokens, self._kv8) if together > 1 else 0
        self._launch(variant, "split", grid, THREADS, [job], _fixed(heads, high) + room)
        merge = _variant("attention_combine", heads, self._kv8)
        grid = batch * job.tokens, layer.heads, 1
        self._launch(merge, "combine", grid, heads.padded // 4, [job])

    def _prepare(self, job: _AttentionJob, layer: LayerSpec, vectors: int) -> None:
        rows, parts = job.batch * job.tokens, _parts(vectors)
        variant = _variant("attention_prepare", _heads(layer), self._kv8)
        early = rows * parts <= BESIDE
        self._launch(variant, "prepare", (rows, parts, 1), THREADS, [job], early=early)


def partial_bytes(layer: LayerSpec, rows: int) -> int:
    """Most bytes of partial outputs and their sums in calls of up to this many rows. Calls with
    more rows run `walk`, which has none."""
    most = min(rows * layer.heads, WALK_FROM * 8 * TILES[-1])
    return LANES * most * (_padded(layer.head_dim) + 2) * 4


def lanes_seen(layer: LayerSpec, tokens: int) -> int:
    """Lanes with keys that some of so many tokens sees, at most."""
    if layer.window is None:
        return LANES
    return min(LANES, (layer.window + tokens - 3) // _chunk(layer) + 2)


def _high(queries: int, most: int) -> int:
    """Tiles of 8 rows per CTA."""
    return next((high for high in TILES if queries <= 8 * high and high <= most), most)


def _spread(layer: LayerSpec, batch: int, tokens: int, processors: int) -> int:
    """The same for `split`: the fewest with which all its CTAs run at once. A CTA with fewer rows
    takes less time, as long as none waits for another one's end."""
    queries, dim = tokens * layer.heads // layer.kv_heads, _padded(layer.head_dim)
    seen = batch * layer.kv_heads * lanes_seen(layer, tokens)
    for high in TILES:
        at_once = 2 if dim <= PAIRED[0] and high <= PAIRED[1] else 1
        if seen * _shares(queries, high) <= at_once * processors:
            return high
    return _high(queries, TILES[-1])


def _most_walking(dim: int) -> int:
    return WIDE_TILES if dim == WIDE else TILES[-1]


def _most_alone(dim: int, prepared: int) -> int:
    """Vectors per CTA up to which `split` runs without `prepare`. prepared: CTAs of `prepare`."""
    if dim != WIDE:
        return ALONE_VECTORS
    return MOST_WIDE if prepared > MANY_PREPARED else ALONE_WIDE


def _together(dim: int) -> int:
    """Vectors that a warp makes at a time where there are many."""
    return TOGETHER_WIDE if dim == WIDE else TOGETHER


def _parts(vectors: int) -> int:
    """CTAs of `prepare` that a row's vectors take."""
    return -(-vectors // 8)


def _shares(queries: int, high: int) -> int:
    """CTAs that share a KV head's rows."""
    return -(-queries // (8 * high))


def _variant(
    file: str, heads: _Heads, kv8: int, high: int | None = None, together: int = 1
) -> Variant:
    size = ("HD", heads.padded), ("DIM", heads.dim), ("CHUNK", heads.chunk)
    tiles = () if high is None else (("NT", high),)
    raw = () if heads.normed else (("NORMED", 0),)
    lanes = (("VECTOR", 32 // together),) if together > 1 else ()
    return Variant(file, (*size, ("KV8", kv8), *tiles, *raw, *lanes))


def _filled(high: int) -> int:
    """Rows of a CTA in the tensor cores, which take sixteen at a time."""
    return -(-high // 2) * 16


def _fixed(heads: _Heads, high: int) -> int:
    """Bytes of `Shared` in attention_chunk.cuh."""
    slices, chunk = CHUNK // heads.chunk, heads.chunk
    return _filled(high) * (heads.padded + chunk) * 2 + 8 * high * (slices * (chunk + 4) * 4 + 16)


def _room_together(dim: int, tokens: int, kv8: int) -> int:
    """Further bytes of shared memory where a warp computes several vectors at a time: norms'
    weights and angles, new keys and values (attention_split.cu)."""
    return 4 * dim * (2 + tokens) + 2 * tokens * (dim * (1 if kv8 else 2) + 16)


def _heads(layer: LayerSpec) -> _Heads:
    return _Heads(layer.head_dim, _chunk(layer), layer.normed)


def _chunk(layer: LayerSpec) -> int:
    """Keys per chunk. A function of the layer alone, because the order of sums depends on it."""
    short = layer.window is not None and layer.window <= LANES // 2 * SHORT_CHUNK
    return SHORT_CHUNK if short or _padded(layer.head_dim) == WIDE else CHUNK


def _ring(heads: _Heads, high: int, kv8: int) -> tuple[int, int]:
    """Stages of `walk`'s ring, and bytes with all that is beside it: of half a multiprocessor's
    shared memory if enough stages fit into that, else of all."""
    fixed, stage = _fixed(heads, high), STAGE * heads.padded * (1 if kv8 else 2) + 16
    half = ((SHARED_LIMIT - 1024) // 2 - fixed) // stage
    stages = half if half >= FEWEST else (SHARED_LIMIT - fixed) // stage
    return stages, fixed + stages * stage


def _padded(head_dim: int) -> int:
    return next(dim for dim in HEADS if head_dim <= dim)


def _rope_tables(
    rope: Rope, head_dim: int, positions: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, head_dim / 2] float32; pairs that don't rotate get angle 0."""
    places = torch.arange(positions, device=device, dtype=torch.float32)
    angles = places[:, None] * inverse_frequencies(rope, head_dim, device)[: head_dim // 2]
    return angles.cos(), angles.sin()
