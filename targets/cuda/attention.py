"""Split-KV attention as launches of our kernels: a part of `Kernels`.

Few rows: `prepare`, `split` (a CTA per lane of chunks) and `combine`; very few go without
`prepare`. Enough of them to keep the machine busy: `fused` alone. All do the same arithmetic
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
from targets.cuda.ops import AttentionLayer, Rows, reach_of

THREADS = 256
HEADS = (64, 128, 256, 512)
"""What head_dim is padded to: there are kernels for each."""
TILES = (1, 2, 4)
"""Tiles of 8 query rows per CTA."""
WIDE = 512
"""Head size for which there are fewer registers per value."""
WIDE_TILES_M = 2
"""Most tiles of query rows per CTA of `fused` with heads of `WIDE`: registers hold no more."""
LANES = 16
"""Lanes, to which chunks of keys are dealt by absolute position (attention.cuh): the fewest, and
all that short texts use."""
MOST_LANES = 64
"""Lanes of a global layer with one K/V head; of one with two, half as many. Its long texts then
have CTAs for the whole machine; more lanes would only have to be merged."""
SHORT_CHUNK = 64
"""Keys per chunk where it is not `CHUNK`: for heads of `WIDE`, because registers hold no more, and
for windows that then fit into half of the lanes, because their keys are dealt to twice as many
CTAs. With a window that needs all lanes, one lane would have two chunks, one after the other
(docs/performance.md)."""
STAGE_KEYS = 64
"""Keys per stage of `fused`'s ring."""
MIN_STAGES = 3
"""Stages with which that ring still keeps memory busy."""
FUSED_FROM_CTAS = 128
"""CTAs that are enough for the machine when each does all lanes."""
LONG = 8192
"""Entries of a global layer's cache from which one row may take far longer than the others: then
its lanes are dealt to CTAs however many rows there are."""
LONG_BYTES = 512 << 20
"""Most bytes of partial outputs that this may take."""
FAR = 98_304
"""Entries of a global layer's cache, more than the default context takes, from which verifies are
for long texts first: a CTA has more rows, for which keys are read once, and fewer lanes. That makes
short texts a little slower."""
LONG_TOKENS = 32
"""Most tokens per sequence of such calls: a verify's."""
UNPREPARED_VECTORS = 32
"""Largest number of vectors per CTA (queries, new keys and values) that `split` computes itself, in
a few rounds of its warps; with more, launching `prepare` first is faster."""
UNPREPARED_VECTORS_WIDE = 24
"""The same with heads of `WIDE`."""
UNPREPARED_VECTORS_WIDE_MANY = 48
"""The same with heads of `WIDE` where `prepare` would have more than `MANY_PREPARE_CTAS` CTAs."""
MANY_PREPARE_CTAS = 24
"""CTAs of `prepare` up to which they are few."""
ONE_VECTOR_PER_WARP = 12
"""Vectors per CTA of `split` up to which each of its eight warps computes one at a time."""
VECTORS_PER_WARP = 2
"""Vectors that a warp computes at a time if there are more of them, which takes longer."""
VECTORS_PER_WARP_WIDE = 4
"""The same with heads of `WIDE`."""
PAIRED_HEAD_DIM = 256
"""Largest head size with which two CTAs of `split` fit on a multiprocessor at once."""
PAIRED_TILES_M = 2
"""Most tiles of query rows per CTA with which they do."""
PDL_PREPARE_CTAS = 32
"""CTAs of `prepare` that fit beside a projection's, on the few multiprocessors that it leaves free:
more of them would run one after the other there."""
STORED_IN_ATTENTION = 16
"""Tokens per sequence up to which attention stores their keys and values, in every CTA that sees
them; for more, a kernel of its own does."""


class _AttentionJob(Structure):
    """A kernel is given as much of it as it declares: `reach` is of `REACHING` variants alone."""

    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "q_norm", "k_norm", "cosine", "sine", "k", "v")),
        *((name, c_void_p) for name in ("start", "slot", "x", "q", "partial", "sums")),
        *((name, c_int) for name in ("stride", "batch", "tokens", "group", "kv_heads")),
        *((name, c_int) for name in ("entries", "window", "own", "k_eq_v")),
        *((name, c_int) for name in ("stores", "stages", "rows")),
        *((name, c_int) for name in ("fp8", "k_blocks", "block", "k_groups")),
        ("eps", c_float),
        ("reach", c_void_p),
    )


class _Heads(NamedTuple):
    """Compile-time constants of a layer: head_dim, keys of a chunk, lanes, as `LayerSpec` has them,
    and whether tokens have a reach. The number of query heads per KV head is passed at run time:
    compiled in, it costs 0.6 % with several tokens (docs/performance.md)."""

    dim: int
    chunk: int
    lanes: int
    normed: bool
    raw_values: bool
    both_ways: bool
    reaching: bool

    @property
    def padded(self) -> int:
        return _padded(self.dim)


def variants(arch: Arch, kv8: int) -> set[Variant]:
    """kv8: whether the cache is e4m3."""
    kinds = {_heads(layer) for layer in arch.layers}
    files = "attention_prepare", "attention_combine"
    return _attending(kinds, kv8) | {
        _variant(file, heads, kv8) for file in files for heads in kinds
    }


def reaching_variants(arch: Arch, kv8: int) -> set[Variant]:
    """What calls need besides in which tokens have a reach."""
    kinds = {_heads(layer, reaching=True) for layer in arch.layers if layer.sliding}
    combine = {_variant("attention_combine", heads, kv8) for heads in kinds}
    return _attending(kinds, kv8) | combine


def _attending(kinds: set[_Heads], kv8: int) -> set[Variant]:
    """Of `split` and `fused`."""
    splits = {
        _variant("attention_split", heads, kv8, tiles_m, vectors_per_warp)
        for heads in kinds
        for tiles_m in TILES
        for vectors_per_warp in (1, _vectors_per_warp(heads.padded))
    }
    fused = {
        _variant("attention_fused", heads, kv8, tiles_m)
        for heads in kinds
        for tiles_m in TILES
        if tiles_m <= _max_fused_tiles_m(heads.padded)
    }
    return splits | fused


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
        k_groups: int = tiles.EIGHTHS,
    ) -> None:
        """k_groups: of the weight that the output meets."""
        self._launch, self._kv8, self._k_groups = launch, kv8, k_groups
        self._eps, self._device, self._processors = arch.eps, device, processors
        self._rope = {
            (layer.rope, layer.head_dim): _rope_tables(
                layer.rope, layer.head_dim, positions, device
            )
            for layer in {layer.rope: layer for layer in arch.layers}.values()
        }

    def run(self, qkv: Tensor, inputs: AttentionLayer, rows: Rows, kind: str) -> Input:
        """`Ops.attention`. For "w8a8": rows of f16 (value / 32) that are not quantised yet, as an
        input with block 0."""
        (batch, tokens), layer = rows.tokens.shape, inputs.spec
        size = batch * tokens, layer.heads * layer.head_dim
        x = (
            make_rows(*size, self._device)
            if kind == "w8a8"
            else make_input(*size, self._device, self._k_groups)
        )
        heads, queries = batch * layer.kv_heads, tokens * layer.heads // layer.kv_heads
        dim = _padded(layer.head_dim)
        tiles_m = _tiles_m(queries, _max_fused_tiles_m(dim))
        full = heads * _shares(queries, tiles_m) >= FUSED_FROM_CTAS
        if full and not _may_be_uneven(layer, inputs.cache.size, batch, tokens):
            self._fused(self._job(qkv, inputs, rows, x, kind), layer, batch, tiles_m)
            return x
        entries = inputs.cache.size
        tiles_m, sharing = _spread(layer, batch, tokens, entries, self._processors)
        vectors = min(queries, 8 * tiles_m) + 2 * tokens
        per_row = layer.heads + (2 * layer.kv_heads if layer.kv_from is None else 0)
        alone = vectors <= _max_unprepared(dim, batch * tokens * _parts(per_row))

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, device=self._device)

        # q has 16-bit values, two per float; lanes first: those of a short context share pages
        q = None if alone else new(heads, _shares(queries, tiles_m), dim // 2, _filled(tiles_m))
        lanes = _lanes(layer)
        room = q, new(lanes, heads, queries, dim), new(lanes, heads, queries, 2)
        job = self._job(qkv, inputs, rows, x, kind, room)
        job.rows = 8 * tiles_m
        if not alone:
            self._prepare(job, layer, per_row)
        self._split(
            job,
            layer,
            batch,
            tiles_m,
            sharing,
            _vectors_per_warp(dim) if alone and vectors > ONE_VECTOR_PER_WARP else 1,
        )
        return x

    def store(self, qkv: Tensor, layer: AttentionLayer, rows: Rows) -> None:
        """`Ops.store`."""
        job = self._job(qkv, layer, rows, None, "")
        self._prepare(job, layer.spec, 2 * layer.spec.kv_heads)

    def _job(
        self,
        qkv: Tensor,
        inputs: AttentionLayer,
        rows: Rows,
        x: Input | None,
        kind: str,
        room: tuple[Tensor | None, ...] = (None, None, None),
    ) -> _AttentionJob:
        """room: for queries, partial outputs and their sums."""
        (batch, tokens), layer, cache = rows.tokens.shape, inputs.spec, inputs.cache
        cosine, sine = (part[inputs.ahead :] for part in self._rope[layer.rope, layer.head_dim])
        k_blocks, block, k_groups = (x.k_blocks, x.block, x.k_groups) if x else (0, 0, 1)
        q, partial, sums = room
        own = layer.kv_from is None
        return _AttentionJob(
            qkv=address(qkv),
            q_norm=address(inputs.q_norm),
            k_norm=address(inputs.k_norm),
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
            stores=int(own and tokens <= STORED_IN_ATTENTION),
            stages=0,
            rows=0,
            fp8=int(kind != "bf16"),
            k_blocks=k_blocks,
            block=block,
            k_groups=k_groups,
            eps=self._eps,
            reach=address(reach_of(rows, layer)),
        )

    def _fused(self, job: _AttentionJob, layer: LayerSpec, batch: int, tiles_m: int) -> None:
        heads = _heads(layer, bool(job.reach))
        if job.own and not job.stores:
            self._prepare(job, layer, 2 * layer.kv_heads)
        job.stages, shared = _ring(heads, tiles_m, self._kv8)
        grid = (_shares(job.tokens * job.group, tiles_m), layer.kv_heads, batch)
        variant = _variant("attention_fused", heads, self._kv8, tiles_m)
        self._launch(variant, "fused", grid, THREADS + 32, [job], shared)

    def _split(
        self,
        job: _AttentionJob,
        layer: LayerSpec,
        batch: int,
        tiles_m: int,
        sharing: int,
        vectors_per_warp: int,
    ) -> None:
        """sharing: CTAs that share a column's lanes. vectors_per_warp: vectors that a warp computes
        at a time."""
        heads = _heads(layer, bool(job.reach))
        shares = _shares(job.tokens * job.group, tiles_m)
        grid = (shares * LANES, layer.kv_heads * sharing, batch)
        variant = _variant("attention_split", heads, self._kv8, tiles_m, vectors_per_warp)
        room = _vectors_bytes(heads.padded, job.tokens, self._kv8) if vectors_per_warp > 1 else 0
        self._launch(variant, "split", grid, THREADS, [job], _fixed(heads, tiles_m) + room)
        merge = _variant("attention_combine", heads, self._kv8)
        grid = batch * job.tokens, layer.heads, 1
        self._launch(merge, "combine", grid, heads.padded // 4, [job])

    def _prepare(self, job: _AttentionJob, layer: LayerSpec, vectors: int) -> None:
        rows, parts = job.batch * job.tokens, _parts(vectors)
        variant = _variant("attention_prepare", _heads(layer), self._kv8)
        pdl = rows * parts <= PDL_PREPARE_CTAS
        self._launch(variant, "prepare", (rows, parts, 1), THREADS, [job], pdl=pdl)


def partial_bytes(layer: LayerSpec, rows: int, entries: int) -> int:
    """Most bytes of partial outputs and their sums in calls of up to this many rows, over a cache
    of so many entries. Calls with more rows run `fused`, which has none."""
    most = -(-FUSED_FROM_CTAS * 8 * _max_fused_tiles_m(_padded(layer.head_dim)) // layer.heads)
    few = _partial(layer, min(rows, most))
    if layer.window is not None or entries <= LONG:
        return few
    return max(few, min(_partial(layer, rows), LONG_BYTES))


def _partial(layer: LayerSpec, rows: int) -> int:
    return _lanes(layer) * rows * layer.heads * (_padded(layer.head_dim) + 2) * 4


def lanes_seen(layer: LayerSpec, tokens: int) -> int:
    """Lanes with keys that some of so many tokens sees, at most; in a global layer columns of
    lanes."""
    if layer.window is None:
        return LANES
    return min(LANES, (layer.window + tokens - 3) // _chunk(layer) + 2)


def _may_be_uneven(layer: LayerSpec, entries: int, batch: int, tokens: int) -> bool:
    """Whether one row's keys may take far longer than all others', and its lanes can be dealt."""
    long = layer.window is None and entries > LONG and tokens <= LONG_TOKENS
    return long and _partial(layer, batch * tokens) <= LONG_BYTES


def _tiles_m(queries: int, most: int) -> int:
    """Tiles of 8 rows per CTA."""
    return next((tiles_m for tiles_m in TILES if queries <= 8 * tiles_m and tiles_m <= most), most)


def _spread(
    layer: LayerSpec, batch: int, tokens: int, entries: int, processors: int
) -> tuple[int, int]:
    """The same for `split`, the fewest with which all its CTAs run at once, and the most CTAs with
    which they still do that share a column's lanes. A CTA with fewer rows takes less time, as long
    as none waits for another one's end. entries: of the cache; above `FAR` CTAs have as few lanes
    as possible, and as few rows as that allows."""
    queries, dim = tokens * layer.heads // layer.kv_heads, _padded(layer.head_dim)
    seen = batch * layer.kv_heads * lanes_seen(layer, tokens)
    ways = []
    for tiles_m in TILES:
        at_once = 2 if dim <= PAIRED_HEAD_DIM and tiles_m <= PAIRED_TILES_M else 1
        fitting = at_once * processors // (seen * _shares(queries, tiles_m))
        sharing = _lanes(layer) // LANES
        while sharing > fitting:
            sharing //= 2
        if sharing:
            ways.append((tiles_m, sharing))
    if not ways:
        return _tiles_m(queries, TILES[-1]), 1
    return max(ways, key=lambda way: way[1]) if entries > FAR else ways[0]


def _max_fused_tiles_m(dim: int) -> int:
    return WIDE_TILES_M if dim == WIDE else TILES[-1]


def _max_unprepared(dim: int, prepared: int) -> int:
    """Vectors per CTA up to which `split` runs without `prepare`. prepared: CTAs of `prepare`."""
    if dim != WIDE:
        return UNPREPARED_VECTORS
    return UNPREPARED_VECTORS_WIDE_MANY if prepared > MANY_PREPARE_CTAS else UNPREPARED_VECTORS_WIDE


def _vectors_per_warp(dim: int) -> int:
    """Vectors that a warp makes at a time where there are many."""
    return VECTORS_PER_WARP_WIDE if dim == WIDE else VECTORS_PER_WARP


def _parts(vectors: int) -> int:
    """CTAs of `prepare` that a row's vectors take."""
    return -(-vectors // 8)


def _shares(queries: int, tiles_m: int) -> int:
    """CTAs that share a KV head's rows."""
    return -(-queries // (8 * tiles_m))


def _variant(
    file: str, heads: _Heads, kv8: int, tiles_m: int | None = None, vectors_per_warp: int = 1
) -> Variant:
    size = ("PADDED_HEAD_DIM", heads.padded), ("HEAD_DIM", heads.dim), ("CHUNK_KEYS", heads.chunk)
    tiles = () if tiles_m is None else (("TILES_M", tiles_m),)
    lanes = LANES if file == "attention_prepare" else heads.lanes  # that one sums nothing
    other = () if lanes == LANES else (("LANES", lanes),)
    other += () if heads.normed else (("NORMED", 0),)
    other += (("RAW_VALUES", 1),) if heads.raw_values else ()
    other += (("BOTH_WAYS", 1),) if heads.both_ways else ()
    other += (("REACHING", 1),) if heads.reaching else ()
    other += (("LANES_PER_VECTOR", 32 // vectors_per_warp),) if vectors_per_warp > 1 else ()
    return Variant(file, (*size, ("FP8_CACHE", kv8), *tiles, *other))


def _filled(tiles_m: int) -> int:
    """Rows of a CTA in the tensor cores, which take sixteen at a time."""
    return -(-tiles_m // 2) * 16


def _fixed(heads: _Heads, tiles_m: int) -> int:
    """Bytes of `Shared` in attention_chunk.cuh."""
    slices, chunk = CHUNK // heads.chunk, heads.chunk
    return _filled(tiles_m) * (heads.padded + chunk) * 2 + 8 * tiles_m * (
        slices * (chunk + 4) * 4 + 16
    )


def _vectors_bytes(dim: int, tokens: int, kv8: int) -> int:
    """Further bytes of shared memory where a warp computes several vectors at a time: norms'
    weights and angles, new keys and values (attention_split.cu)."""
    return 4 * dim * (2 + tokens) + 2 * tokens * (dim * (1 if kv8 else 2) + 16)


def _heads(layer: LayerSpec, reaching: bool = False) -> _Heads:
    kind = layer.normed, layer.raw_values, layer.both_ways, reaching
    return _Heads(layer.head_dim, _chunk(layer), _lanes(layer), *kind)


def _lanes(layer: LayerSpec) -> int:
    """A function of the whole model's layer alone, because the order of sums depends on it."""
    if layer.window is not None:
        return LANES
    each = MOST_LANES // (layer.whole_kv_heads or layer.kv_heads)
    return max(LANES, 1 << each.bit_length() >> 1)


def _chunk(layer: LayerSpec) -> int:
    """Keys per chunk. A function of the layer alone, because the order of sums depends on it."""
    short = layer.window is not None and layer.window <= LANES // 2 * SHORT_CHUNK
    return SHORT_CHUNK if short or _padded(layer.head_dim) == WIDE else CHUNK


def _ring(heads: _Heads, tiles_m: int, kv8: int) -> tuple[int, int]:
    """Stages of `fused`'s ring, and bytes with all that is beside it: of half a multiprocessor's
    shared memory if enough stages fit into that, else of all."""
    fixed, stage = _fixed(heads, tiles_m), STAGE_KEYS * heads.padded * (1 if kv8 else 2) + 16
    half = ((SHARED_LIMIT - 1024) // 2 - fixed) // stage
    stages = half if half >= MIN_STAGES else (SHARED_LIMIT - fixed) // stage
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
