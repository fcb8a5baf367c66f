"""The steps of a long prefill chunk on a Hopper GPU: cuBLAS multiplies, flash attention attends,
and kernels of our own (`kernels/prefill*.cu`) do in one pass what lies between two matmuls.

Everything that a row meets follows from the chunk's own length and position. Nothing waits for
the device. Shape legend: as in prefill_steps.py; N query heads, R rows of queries at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import Structure, c_float, c_int, c_void_p

import torch
from torch import Tensor

from targets.arch import LayerSpec, Rope
from targets.cuda.cache import LANES
from targets.cuda.formulas import inverse_frequencies
from targets.cuda.launch import pointer
from targets.cuda.ops import NOTHING, AttentionLayer, Closing, Dense, Opening
from targets.cuda.prefill_launch import PACKS, QUADS, SOFTMAX, PrefillLauncher, attention
from targets.cuda.prefill_steps import Pair, PrefillChunk, PrefillInput
from targets.cuda.tiles import ACTIVATION_SCALE

FLASH_HEAD_DIM = 256
"""The widest head that torch's flash attention takes; it masks windows and shares KV heads."""
ALIGN = 64
"""Keys are padded to multiples of this where scores are stored: matmuls need aligned rows."""
ROOM = 24 << 20
"""Floats of a chunk's scratch memory: sums of 4-bit weights before rounding, scores and shares."""
SCORES = ROOM * 2 // 3
"""Scores at once, and half as much for their softmax. More was no faster."""
GATED_ROWS = 1280
"""Most rows of gate and up in memory at once, since they are a layer's widest."""
GATED_ROWS_MULTIPLE = 16
"""Such rows are cut at multiples of this."""
MOST_ROWS = 512
"""Queries at once: each is multiplied with all keys of the last one, more in a larger block."""
LEAST_ROWS = 16
"""Queries at once where keys are many, and what their number is a multiple of."""


class _Place(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("k", "v", "keys", "values")),
        *((name, c_int) for name in ("entries", "padded", "dim", "kv_heads")),
        *((name, c_int) for name in ("slot", "start", "tokens", "oldest")),
    )


class PrefillKernels:
    """`prefill_steps.Steps` for one chunk."""

    def __init__(self, chunk: PrefillChunk, eps: float) -> None:
        self.chunk, self.eps, self.tokens = chunk, eps, len(chunk.tokens)
        self.device = chunk.tokens.device
        self.launch = PrefillLauncher(self.device)
        self._rotations: dict[tuple[Rope, int], Pair] = {}
        self._floats: Tensor | None = None

    def add_norm(self, h: Tensor, opening: Opening, closing: Closing = NOTHING) -> PrefillInput:
        (rows, hidden), kind, branch = h.shape, opening.kind, closing.branch
        x = self.launch.input(rows, hidden, kind)
        wide = branch is not None and branch.dtype == torch.float32
        arguments = [*map(pointer, (h, *closing, opening.pre, *x))]
        arguments += [c_int(hidden), c_float(self.eps), c_int(wide)]
        self.launch.each_row("add_norm", kind, rows, hidden // 4, QUADS, arguments)
        return x

    def matmul(self, x: PrefillInput, weight: Dense) -> Tensor:
        values, factor = weight[0], _factor_of_sums(x, weight)
        if factor is None:
            return self._product(x, weight)
        out = self.launch.new(len(x.values), len(values))
        for part in _some_rows(len(out), ROOM // len(values)):
            torch.mul(self._sums(x.part(part), values), factor, out=out[part])
        return out

    def _sums(self, x: PrefillInput, values: Tensor) -> Tensor:
        """[T, n] float32, for of 4 bits they leave float16's range; there until the next ones, or
        scores."""
        sums = self._room(len(x.values) * len(values)).view(-1, len(values))
        return torch.ops.aten.mm.dtype_out(x.values, values.T, torch.float32, out=sums)

    def _product(self, x: PrefillInput, weight: Dense) -> Tensor:
        """[T, n] bf16."""
        values, scale = weight
        if scale is None:
            return x.values @ values.T
        assert x.scale is not None, "of 4 bits there are sums"
        # fast accumulation errs by 0.4 % where the full one errs by 0.2 %: both little beside the
        # inputs' own 4 bits (2 to 3 %). It takes 15 % less time.
        return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            x.values,
            values.T,
            scale_a=x.scale[:, None],
            scale_b=scale[None],
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    def grouped(self, x: PrefillInput, ends: Tensor, weight: Dense) -> Tensor:
        across, scale = weight[0].transpose(1, 2), weight[1]
        if scale is None:
            return torch._grouped_mm(x.values, across, ends)  # pyright: ignore[reportPrivateImportUsage]
        assert x.scale is not None, "experts of 4 bits are multiplied as they are stored"
        return torch._scaled_grouped_mm(  # pyright: ignore[reportPrivateImportUsage]
            x.values,
            across,
            x.scale,
            scale,
            ends,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    def gate_up(
        self, x: PrefillInput, parts: Iterator[tuple[slice, Dense]], width: int, kind: str
    ) -> PrefillInput:
        rows = len(x.values)
        out = self.launch.input(rows, width, kind)
        for features, weight in parts:
            values, factor = weight[0], _factor_of_sums(x, weight)
            for part in _some_rows(rows, GATED_ROWS):
                inputs, own = x.part(part), out.part(part)
                own = own._replace(values=own.values[:, features])
                both = (
                    self._product(inputs, weight) if factor is None else self._sums(inputs, values)
                )
                self._gate(both, factor, own, kind)
        return out

    def gated(self, gate_up: Tensor, kind: str) -> PrefillInput:
        out = self.launch.input(gate_up.shape[0], gate_up.shape[1] // 2, kind)
        self._gate(gate_up, None, out, kind)
        return out

    def _gate(self, gate_up: Tensor, factor: Tensor | None, out: PrefillInput, kind: str) -> None:
        rows, width = out.values.shape
        arguments = [*map(pointer, (gate_up, factor, *out))]
        arguments += [c_int(width), c_int(out.values.stride(0))]
        name = "gate" if factor is None else "scaled_gate"
        self.launch.each_row(name, kind, rows, width // 8, PACKS, arguments)

    def exchange(self, qkv: Tensor, layer: AttentionLayer) -> Pair:
        spec, store, start = layer.spec, layer.cache, self.chunk.start
        stop, oldest = start + self.tokens, self.chunk.oldest(spec.window)
        count, heads, dim = stop - oldest, spec.kv_heads, spec.head_dim
        k, v = (self.launch.new(padded_keys(count), heads, dim) for _ in range(2))
        for part in (k, v):
            part[count:] = 0  # met by shares of 0, and must not be NaN
        place = _Place(
            k=store.k.data_ptr(),
            v=store.v.data_ptr(),
            keys=k.data_ptr(),
            values=v.data_ptr(),
            entries=store.size,
            padded=store.k.shape[-1],
            dim=dim,
            kv_heads=heads,
            slot=self.chunk.slot,
            start=start,
            tokens=self.tokens,
            oldest=oldest,
        )
        variant = attention(store.k.dtype, dim)
        if oldest < start:
            self.launch.run(variant, "recall", (_blocks(oldest, start), heads, 1), 256, [place])
        raw = qkv[:, spec.heads * dim :]
        arguments = [place, pointer(raw), pointer(layer.k_norm), *self._rotation(spec)]
        arguments += [c_int(qkv.stride(0)), c_int(spec.k_eq_v), c_float(self.eps)]
        self.launch.run(variant, "keys", (_blocks(start, stop), heads, 1), 512, arguments)
        return k, v

    def attend(self, qkv: Tensor, layer: AttentionLayer, pair: Pair, kind: str) -> PrefillInput:
        spec, heads, dim = layer.spec, layer.spec.heads, layer.spec.head_dim
        runs = spec.kv_heads if dim > FLASH_HEAD_DIM else 1
        q = self.launch.new(runs, self.tokens, heads // runs, dim)
        arguments = [pointer(qkv), pointer(layer.q_norm), *self._rotation(spec), pointer(q)]
        arguments += [c_int(n) for n in (qkv.stride(0), heads, runs, dim)] + [c_float(self.eps)]
        variant = attention(torch.bfloat16, dim)
        self.launch.run(variant, "queries", (self.tokens, 1, 1), 256, arguments)
        count = self.chunk.start + self.tokens - self.chunk.oldest(spec.window)
        if dim > FLASH_HEAD_DIM:
            assert spec.window is None or not self.chunk.spans, "refused at load"
            out = self._wide(q, *pair, count, spec.window)
        else:
            out = self._pieces(q[0], *pair, count, spec.window)
        width = heads * dim
        if kind == "bf16" and runs == 1:
            return PrefillInput(out.view(self.tokens, width), None)
        x = self.launch.input(self.tokens, width, kind)
        arguments = [pointer(out), *map(pointer, x), c_int(width), c_int(runs)]
        self.launch.each_row("narrow", kind, self.tokens, width // 8, PACKS, arguments)
        return x

    def _pieces(self, q: Tensor, k: Tensor, v: Tensor, count: int, window: int | None) -> Tensor:
        """q [T, N, D] -> the same shape; one call but where there are pictures."""
        before, parts = count - self.tokens, []
        for first, stop, both_ways in self.chunk.pieces(window):
            seen = slice(before + stop)
            parts.append(_flash(q[first:stop], k[seen], v[seen], window, both_ways))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _wide(self, q: Tensor, k: Tensor, v: Tensor, count: int, window: int | None) -> Tensor:
        """q [K, T, G, D] -> the same shape. Plain matmuls around a softmax, a block of queries at
        a time, no further than the last key that its last query sees."""
        kv_heads, tokens, group, dim = q.shape
        across, values, rows = k.permute(1, 2, 0), v.transpose(0, 1), q.flatten(1, 2)
        out = torch.empty_like(rows)
        block = _queries_at_once(kv_heads * group, len(k))
        # of the last block, which sees most keys: each needs a little more than the one before
        self._room(_with_shares(kv_heads * min(block, tokens) * group * padded_keys(count)))
        for first in range(0, tokens, block):
            part = slice(first * group, min(first + block, tokens) * group)
            query = count - tokens + first
            width = padded_keys(min(query + block, count))
            scores, shares = self._scores(kv_heads, part.stop - part.start, width)
            torch.ops.aten.bmm.dtype_out(
                rows[:, part], across[..., :width], torch.float32, out=scores
            )
            arguments = [pointer(scores), pointer(shares)]
            arguments += [c_int(n) for n in (width, query, group, window or 0)]
            grid = (scores.shape[1], kv_heads, 1)
            self.launch.run(SOFTMAX, "softmax", grid, 256, arguments)
            torch.bmm(shares, values[:, :width], out=out[:, part])
        return out

    def _scores(self, *shape: int) -> Pair:
        """Scores and shares of this shape."""
        size = shape[0] * shape[1] * shape[2]
        room = self._room(_with_shares(size))
        return room[:size].view(shape), room[size:].view(torch.bfloat16).view(shape)

    def _room(self, size: int) -> Tensor:
        """Floats: one piece of memory for all of a chunk's, so that no two sizes lie side by side
        in the allocator."""
        if self._floats is None or len(self._floats) < size:
            self._floats = None  # the old one goes before the new one comes
            self._floats = torch.empty(max(size, ROOM), device=self.device)
        return self._floats[:size]

    def _rotation(self, layer: LayerSpec) -> tuple[c_void_p, c_void_p]:
        """cos and sin [T, D / 2] float32 of the chunk's positions."""
        key = layer.rope, layer.head_dim
        if key not in self._rotations:
            places = torch.arange(self.tokens, device=self.device) + self.chunk.start
            angles = places[:, None] * inverse_frequencies(*key, self.device)
            self._rotations[key] = angles.cos(), angles.sin()
        cosine, sine = self._rotations[key]
        return pointer(cosine), pointer(sine)


def room_of(layer: LayerSpec, positions: int) -> int:
    """Floats of scratch memory for chunks of up to so many positions. Many keys need more than
    `ROOM`: of `LEAST_ROWS` queries all scores are there at once."""
    if layer.head_dim <= FLASH_HEAD_DIM or layer.window is not None:
        return ROOM
    keys = padded_keys(positions)
    return max(ROOM, _with_shares(layer.heads * _queries_at_once(layer.heads, keys) * keys))


def padded_keys(count: int) -> int:
    """Rows of a chunk's keys, and of its values."""
    return -(-count // ALIGN) * ALIGN


def _queries_at_once(heads: int, keys: int) -> int:
    block = SCORES // (heads * keys) // LEAST_ROWS * LEAST_ROWS
    return max(LEAST_ROWS, min(MOST_ROWS, block))


def _with_shares(scores: int) -> int:
    """Floats of so many scores and of their shares, which have 16 bits."""
    return scores + scores // 2


def _factor_of_sums(x: PrefillInput, weight: Dense) -> Tensor | None:
    """[n] of a weight of 4 bits."""
    scale = weight[1]
    return None if scale is None or x.scale is not None else scale * ACTIVATION_SCALE


def _some_rows(rows: int, most: int) -> Iterator[slice]:
    """All rows, about equally many at once and no more than `most`."""
    size = -(-rows // -(-rows // most) // GATED_ROWS_MULTIPLE) * GATED_ROWS_MULTIPLE
    return (slice(first, min(first + size, rows)) for first in range(0, rows, size))


def _blocks(start: int, stop: int) -> int:
    """Blocks of LANES positions that start .. stop - 1 touch."""
    return (stop - 1) // LANES - start // LANES + 1


def _flash(q: Tensor, k: Tensor, v: Tensor, window: int | None, both_ways: bool) -> Tensor:
    """The operator itself: torch's own fronts to it have no windows, or not in every version.
    both_ways: each query sees the keys of all queries."""
    return torch.ops.aten._flash_attention_forward(
        *(x[None] for x in (q, k, v)),
        None,
        None,
        len(q),
        len(k),
        0.0,  # dropout
        not both_ways,  # causal, the last query beside the last key
        False,
        scale=1.0,
        window_size_left=None if window is None else window - 1,
        window_size_right=len(q) if both_ways else 0,
    )[0][0]
