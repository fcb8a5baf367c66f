"""The skinny GEMM as launches of `kernels/gemm.cu` and `untile.cu`: a part of `Kernels`."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import Structure, c_float, c_int, c_void_p
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from targets.cuda import four_bits, tiles
from targets.cuda.four_bits import FourBits
from targets.cuda.inputs import BLOCKS, Input
from targets.cuda.int8 import Int8
from targets.cuda.launch import Launcher, Variant, address
from targets.cuda.ops import Dense, Linear

RING_BYTES = 168 << 10
"""Of a CTA for few tokens, at most."""
SHORT_STEPS, SHORT_BYTES = 6, 80 << 10
"""What is enough of 4-bit weights for up to `SHORT_ROWS` tokens: so many steps, and bytes. More in
flight delays everybody's trips through L2, and fills no sooner (docs/performance.md)."""
SHORT_ROWS = 4
ALONE_BYTES = 116 << 10
"""Shared memory of a CTA that has a multiprocessor for itself: two on one would leave another
without any, or take their inputs' turn from the kernel before."""
WIDE_RING_BYTES = 200 << 10
WIDE_FROM = 32
"""Tokens per CTA from which `wide.cu` takes over: inputs then cost as much as weights, and tensor
cores need warpgroups."""
FEW = tuple(block for block in BLOCKS if block < WIDE_FROM)
MANY = tuple(block for block in BLOCKS if block >= WIDE_FROM)
AHEAD_BYTES = 256 << 10
"""What a CTA asks of L2 beyond its ring while the kernel before still runs."""
PACE = 1.0
"""Of what memory can read, what all CTAs together ask for until then: with three times as much in
flight, a hop from one multiprocessor to another takes three times as long (docs/performance.md)."""
ROUNDS_ROWS = 4
"""Tokens up to which inputs come by rounds of the ring (kernels/gemm.cu)."""
BARRIERS = 16
"""Bytes of a stage's two."""
UNTILE_THREADS, UNTILE_BYTES = 512, 96 << 10
"""Of a CTA of untile.cu; what it lays out at once, two of them on a multiprocessor."""
WHOLE_BYTES = 256 << 20
"""In plain order at once: smaller gates and ups in two parts would double the launches of a prompt
that is bound by them, for less memory than `down` takes anyway."""
PLAIN_DTYPES = {16: torch.bfloat16, 8: torch.float8_e4m3fn, 4: torch.float16}
"""Of a value in plain order, by the bits of a stored one."""
PLAIN, GATED, LOGITS, PER_LAYER = range(4)
"""What is done with the sums (gemm.cu)."""
AT_ONCE, IN_TURN, ALL_ASKED = range(3)
"""When the next kernel starts (linear.cuh)."""


class _GemmJob(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("weight", "scale", "x", "out", "inputs")),
        *((name, c_void_p) for name in ("partial", "certified")),
        *((name, c_int) for name in ("inputs_stride", "n", "ctas", "tiles", "passes", "steps")),
        *((name, c_int) for name in ("row_groups", "k_groups", "depth")),
        *((name, c_int) for name in ("k_blocks", "k_stride", "stages")),
        *((name, c_int) for name in ("ahead", "pace", "rows")),
        *((name, c_int) for name in ("out_stride", "out_groups", "epilogue")),
        ("softcap", c_float),
        *((name, c_int) for name in ("silu", "f16", "room", "next", "ready")),
    )


class _Untile(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("tiled", "out")),
        *((name, c_int) for name in ("n", "k", "passes", "ctas", "tiles")),
        *((name, c_int) for name in ("row_groups", "k_groups", "wide", "depth")),
        *((name, c_int) for name in ("steps", "together", "groups", "gate_rows")),
    )


class _Part(NamedTuple):
    """Of a weight: how many passes of so many CTAs, the bytes before theirs, and its rows."""

    passes: int
    ctas: int
    before: int
    rows: int


def variants(kinds: set[str]) -> set[Variant]:
    """For weights of these kinds; of w8a8 ones, which w8a8.cu multiplies, just what tiles are
    turned back with, and of int8 ones, a head's copy alone, what few rows take."""
    mine = kinds - {"w8a8", "int8"}
    few = {
        _few(kind, block, wide) for kind in kinds - {"w8a8"} for block in FEW for wide in (1, 2, 3)
    }
    many = {_many(kind, block, depth) for kind in mine for block in MANY for depth in tiles.DEPTHS}
    gather = {_gather(kind, block) for kind in mine for block in MANY}
    untile = {weight_variant("untile", kind) for kind in kinds - {"int8"}}
    return untile | few | many | gather


class Gemm:
    """Weights times few tokens, on a GPU with this many multiprocessors that reads so many bytes of
    memory a cycle. mixture: whether the model is one, whose memory stands still for most of a
    layer."""

    def __init__(
        self, launch: Launcher, processors: int, bytes_per_cycle: float, mixture: bool = False
    ) -> None:
        self._launch, self._processors = launch, processors
        self._bytes_per_cycle, self._mixture = bytes_per_cycle, mixture
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._scales: dict[tuple[Tensor, int], Tensor] = {}  # as they were, by `_plain_scale`'s key

    def pack(
        self,
        values: Tensor,
        scale: Tensor | None,
        kind: str,
        layout: str,
        groups: int | None = None,
    ) -> Linear:
        """`Ops.pack`: tiled. groups: of a part of a weight, else a whole one's."""
        n, k = values.shape[-2:]
        groups = groups or tiles.k_groups(n, layout)
        if scale is not None:
            scale = (scale.float() * tiles.ACTIVATION_SCALE).contiguous()
        data = tiles.tile(values, kind, layout, groups, self._processors)
        return Linear(n, k, kind, data, scale, layout, groups)

    def pack_codes(self, weight: FourBits | Int8, layout: str, groups: int | None = None) -> Linear:
        """`Ops.pack_codes`; int8 meets inputs as they are."""
        n, k = weight.codes.shape[-2:]
        groups = groups or tiles.k_groups(n, layout)
        scale = weight.row * (1.0 if weight.kind == "int8" else tiles.ACTIVATION_SCALE)
        data = tiles.tile_codes(weight, layout, groups, self._processors)
        scale = scale.contiguous()
        return Linear(n, k, weight.kind, data, scale, layout, groups)

    def with_plain(self, weight: Linear) -> Linear:
        """`Ops.with_plain`."""
        if weight.kind in four_bits.KINDS and weight.layout.startswith("experts"):
            return weight  # prefill takes them as they are
        size = _plain_bytes(weight, weight.n)
        out = torch.empty(size, dtype=torch.uint8, device=weight.data.device)
        self._untile(weight, out, self._whole(weight))
        return replace(weight, plain=_plain_values(out, weight))

    def dense(self, weight: Linear) -> Dense:
        """`Ops.dense`: in memory that all weights share, where it has none of its own."""
        if weight.plain is not None:
            return weight.plain, self._plain_scale(weight)
        return self._in_scratch(weight, self._whole(weight)), self._plain_scale(weight)

    def dense_parts(self, weight: Linear) -> Iterator[tuple[slice, Dense]]:
        """`Ops.dense_parts`."""
        narrow = weight.kind in four_bits.KINDS
        if weight.plain is not None or not narrow or _plain_bytes(weight, weight.n) <= WHOLE_BYTES:
            yield slice(0, weight.n // 2), self.dense(weight)
            return
        for own, part in _parts(weight, tiles.schedule_of(weight, self._processors)):
            yield own, (self._in_scratch(weight, part), self._plain_scale(weight, own))

    def _in_scratch(self, weight: Linear, part: _Part) -> Tensor:
        """Its values in plain order, in memory that all weights share."""
        size = _plain_bytes(weight, part.rows)
        if len(self._scratch) < size:
            self._scratch = torch.empty(0)  # the old one goes before the new one comes
            self._scratch = torch.empty(size, dtype=torch.uint8, device=weight.data.device)
        self._untile(weight, self._scratch, part)
        return _plain_values(self._scratch[:size], weight)

    def _whole(self, weight: Linear) -> _Part:
        plan = tiles.schedule_of(weight, self._processors)
        return _Part(plan.passes, plan.ctas, 0, weight.n)

    def _untile(self, weight: Linear, out: Tensor, part: _Part) -> None:
        plan = tiles.schedule_of(weight, self._processors)
        assert weight.k % 8 == 0, weight.k
        groups = tiles.k_stride(weight) if plan.k_groups > 1 else 1
        step = groups * plan.depth * tiles.INPUTS * tiles.VALUE_BYTES[weight.kind]
        together = min(plan.steps, max(1, UNTILE_BYTES // (plan.tiles * tiles.TILE * step)))
        job = _Untile(
            *(weight.data.data_ptr() + part.before, out.data_ptr()),
            *(part.rows, weight.k, part.passes, plan.ctas, plan.tiles),
            *(plan.row_groups, plan.k_groups, plan.wide, plan.depth, plan.steps, together),
            groups,
            tiles.GATE_ROWS.get(weight.layout, 0),
        )
        grid = (
            part.ctas,
            -(-plan.steps // together) * (plan.k_groups // groups),
            _count(weight) * part.passes,
        )
        rows, pads = plan.tiles * tiles.TILE, tiles.INPUTS * tiles.VALUE_BYTES[weight.kind]
        places = groups * plan.tiles * plan.depth * together
        shared = rows * (together * step + pads + 4) + 8 * places
        variant = weight_variant("untile", weight.kind)
        self._launch(variant, "untile", grid, UNTILE_THREADS, [job], shared, early=False)

    def _plain_scale(self, weight: Linear, part: slice | None = None) -> Tensor | None:
        """Of all rows, or of some features' gates and ups. Divided when first asked for: a launch
        of its own otherwise costs each call."""
        packed = weight.scale
        if packed is None:
            return None
        key = packed, part.start if part else -1
        if key not in self._scales:
            own = packed.view(2, -1)[:, part] if part else packed
            self._scales[key] = own.flatten() / tiles.ACTIVATION_SCALE
        return self._scales[key]

    def linear(self, x: Input, weight: Linear, late: bool = False) -> Tensor:
        """`Ops.linear`. late: of few rows, the next kernel starts no earlier than all kernels
        before this one have ended, and may read their results before it waits."""
        out = torch.empty((x.rows, weight.n), device=weight.data.device)
        self.run(x, weight, out, PLAIN, weight.n, late=late)
        return out

    def run(
        self,
        x: Input,
        weight: Linear,
        out: Tensor,
        epilogue: int,
        stride: int,
        inputs: Tensor | None = None,
        softcap: float = 0.0,
        silu: bool = False,
        f16: bool = False,
        out_groups: int = 1,
        certified: Tensor | None = None,
        room: int = 0,
        late: bool = False,
        ready: bool = False,
    ) -> None:
        """out: float32 rows of `stride`, or an `Input`'s data of `stride` blocks and `out_groups` k
        groups. inputs: what PER_LAYER multiplies with. silu: what GATED gates with, else tanh
        GELU; f16: what it leaves is f16, else bf16. certified [M], of few rows: nothing is done if
        all are 0 to `room`. late: as `linear` has it. ready: of few rows, the kernel before lets
        this one start only when x is there."""
        assert x.k_groups == (weight.k_groups if weight.layout == "row_parallel" else 1)
        plan = tiles.schedule_of(weight, self._processors)
        job = _GemmJob(
            *map(address, (weight.data, weight.scale, x.data, out, inputs)),
            *(None, address(certified)),
            0 if inputs is None else inputs.stride(0),
            *(weight.n, plan.ctas, plan.tiles, plan.passes, plan.steps),
            *(plan.row_groups, plan.k_groups, plan.depth, x.k_blocks),
            *(tiles.k_stride(weight), 0, *self._before(plan, weight.kind)),
            *(x.rows, stride, out_groups, epilogue, softcap, int(silu)),
            *(int(f16), room, self._next(weight.kind, x.block, late), int(ready)),
        )
        if x.block in FEW:
            job.stages, shared = few_stages(plan, weight.kind, x.block)
            variant = _few(weight.kind, x.block, plan.wide)
            self._launch(variant, "gemm", (plan.ctas, 1, 1), 32 * (plan.warps + 1), [job], shared)
        elif plan.k_groups == 1 and epilogue != PER_LAYER:
            self._wide(x, weight, plan, job)
        else:
            self._spread(x, weight, plan, job)

    def _before(self, plan: tiles.Schedule, kind: str) -> tuple[int, int]:
        """How weights are asked for until x is there: `ahead`, `pace` (linear.cuh)."""
        step = plan.step_bytes(kind)
        return AHEAD_BYTES // step, int(plan.ctas * step / (PACE * self._bytes_per_cycle))

    def _next(self, kind: str, block: int, late: bool) -> int:
        """When the next kernel starts. late: as `linear` has it."""
        if late:
            return IN_TURN
        waits = _short(kind, block) or self._mixture and block <= SHORT_ROWS
        return ALL_ASKED if waits else AT_ONCE

    def _wide(self, x: Input, weight: Linear, plan: tiles.Schedule, job: _GemmJob) -> None:
        job.stages, shared = many_stages(plan, weight.kind, x.block)
        shares = -(-plan.ctas // plan.k_groups) * plan.k_groups
        grid = (-(-x.rows // x.block), shares, 1)
        variant = _many(weight.kind, x.block, plan.depth)
        self._launch(variant, "wide", grid, many_threads(plan, x.block), [job], shared)

    def _spread(self, x: Input, weight: Linear, plan: tiles.Schedule, job: _GemmJob) -> None:
        """The k groups' sums one by one, then added."""
        count, blocks = plan.passes * plan.ctas * plan.tiles, -(-x.rows // x.block)
        size = plan.k_groups, count, blocks, tiles.TILE * x.block
        partial = torch.empty(size, device=x.data.device)
        job.partial = partial.data_ptr()
        self._wide(x, weight, plan, job)
        variant = _gather(weight.kind, x.block)
        self._launch(variant, "gather", (count, blocks, 1), 4 * x.block, [job])


def _parts(weight: Linear, plan: tiles.Schedule) -> Iterator[tuple[slice, _Part]]:
    """Of a gated weight, with their features: each pass, or half of the only pass's CTAs."""
    width, features = weight.n // 2, plan.tiles * tiles.TILE // 2
    most = plan.ctas if plan.passes > 1 else -(-plan.ctas // 2)
    for first in range(0, -(-width // features), most):
        of_pass, cta = divmod(first, plan.ctas)
        before = (of_pass * plan.steps * plan.ctas + cta) * plan.step_bytes(weight.kind)
        ctas = min(most, plan.ctas - cta)
        own = slice(first * features, min((first + ctas) * features, width))
        yield own, _Part(1, ctas, before, 2 * (own.stop - own.start))


def _count(weight: Linear) -> int:
    """Experts of a weight, else one."""
    return len(weight.data) if weight.layout.startswith("experts") else 1


def _plain_bytes(weight: Linear, rows: int) -> int:
    """Of so many rows, of each expert's where there are some."""
    return _count(weight) * rows * weight.k * tiles.VALUE_BYTES[weight.kind]


def _plain_values(values: Tensor, weight: Linear) -> Tensor:
    return values.view(PLAIN_DTYPES[tiles.BITS[weight.kind]]).view(-1, weight.k)


def _few(kind: str, block: int, wide: int) -> Variant:
    return weight_variant("gemm", kind, ("TOKENS", block), ("TW", wide))


def _many(kind: str, block: int, depth: int) -> Variant:
    return weight_variant("wide", kind, ("TOKENS", block), ("DEPTH", depth))


def _gather(kind: str, block: int) -> Variant:
    return weight_variant("gemm_reduce", kind, ("TOKENS", block))


def weight_variant(file: str, kind: str, *macros: tuple[str, int]) -> Variant:
    """For weights of this kind (kernels/tile.cuh)."""
    form = {"uint4": "ZEROS", "nvfp4": "E2M1", "int8": "CODES"}
    more = [(form[kind], 1)] if kind in form else []
    return Variant(file, (("BITS", tiles.BITS[kind]), *more, *macros))


def _short(kind: str, block: int) -> bool:
    return tiles.BITS[kind] == 4 and block <= SHORT_ROWS


def few_stages(plan: tiles.Schedule, kind: str, block: int) -> tuple[int, int]:
    """Stages of gemm.cu's ring, and the shared memory of a CTA in bytes. Of few tokens two
    rounds' inputs are kept. Sums of k groups take the ring's place after the last pass; where there
    are more, they have their own."""
    inputs = plan.k_groups * plan.depth * block * 2 * tiles.INPUTS
    stage = plan.step_bytes(kind) + inputs * (2 if block <= ROUNDS_ROWS else 1)
    ring = RING_BYTES
    if _short(kind, block):
        ring = min(ring, max(SHORT_STEPS * stage, SHORT_BYTES))
    stages = max(2, min(ring // stage, plan.steps * plan.passes))
    sums = (plan.k_groups - 1) * plan.tiles * tiles.TILE * 4 * max(block, 8)
    return stages, max(stages * (stage + BARRIERS) + sums * (plan.passes > 1), sums, ALONE_BYTES)


def many_stages(plan: tiles.Schedule, kind: str, block: int) -> tuple[int, int]:
    """Of wide.cu's."""
    stage = plan.step_bytes(kind) + plan.depth * block * 2 * tiles.INPUTS
    stages = max(2, min(WIDE_RING_BYTES // stage, plan.steps * plan.passes))
    return stages, stages * (stage + BARRIERS)


def many_threads(plan: tiles.Schedule, block: int) -> int:
    """A warp per two tiles, in whole warpgroups, and the producers (wide.cu)."""
    return 128 * -(-plan.k_groups * plan.tiles // 8) + (128 if block == 128 else 32)
