"""Weights back in plain order, as launches of `kernels/untile.cu`: a part of `Kernels`. Library
matmuls read them so, for long prompts."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import Structure, c_int, c_void_p
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from targets.cuda import four_bits, tiles
from targets.cuda.launch import Launcher, Variant
from targets.cuda.ops import Dense, Linear

THREADS = 512
"""Threads per CTA of untile.cu."""
CTA_BYTES = 96 << 10
"""Bytes that a CTA lays out at once: two CTAs fit on a multiprocessor."""
WHOLE_BYTES = 256 << 20
"""Bytes up to which gates and ups are untiled whole. Smaller ones in two parts would double the
launches of a prompt that is bound by launches, and save less memory than `down` takes anyway."""
PLAIN_DTYPES = {16: torch.bfloat16, 8: torch.float8_e4m3fn, 4: torch.float16}
"""dtype of values in plain order, by the bits of a stored value."""


class _Job(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("tiled", "out")),
        *((name, c_int) for name in ("n", "k", "passes", "ctas", "tiles")),
        *((name, c_int) for name in ("row_groups", "k_groups", "wide", "depth")),
        *((name, c_int) for name in ("steps", "steps_per_cta", "groups", "gate_rows")),
    )


class _Part(NamedTuple):
    """A part of a weight: passes, CTAs per pass, bytes before them, and rows."""

    passes: int
    ctas: int
    before: int
    rows: int


def variants(kinds: set[str]) -> set[Variant]:
    """For weights of these kinds; a head (kind int8: its codes) is never untiled."""
    return {_variant(kind) for kind in kinds - {"int8"}}


def _variant(kind: str) -> Variant:
    return tiles.weight_variant("untile", kind)


class Untile:
    """Untiles weights that were tiled for a GPU with this many multiprocessors."""

    def __init__(self, launch: Launcher, processors: int) -> None:
        self._launch, self._processors = launch, processors
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._scales: dict[tuple[Tensor, int], Tensor] = {}  # as they were, by `_plain_scale`'s key

    def with_plain(self, weight: Linear) -> Linear:
        """`Ops.with_plain`."""
        if _stays(weight):
            return weight
        size = _plain_bytes(weight, weight.n)
        out = torch.empty(size, dtype=torch.uint8, device=weight.data.device)
        self._run(weight, out, self._whole(weight))
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
        self._run(weight, self._scratch, part)
        return _plain_values(self._scratch[:size], weight)

    def _whole(self, weight: Linear) -> _Part:
        plan = tiles.schedule_of(weight, self._processors)
        return _Part(plan.passes, plan.ctas, 0, weight.n)

    def _run(self, weight: Linear, out: Tensor, part: _Part) -> None:
        plan = tiles.schedule_of(weight, self._processors)
        assert weight.k % 8 == 0 and weight.dealt != "int16" and not _stays(weight), weight
        groups = tiles.k_stride(weight) if plan.k_groups > 1 else 1
        step = groups * plan.depth * tiles.INPUTS * tiles.VALUE_BYTES[weight.kind]
        steps_per_cta = min(plan.steps, max(1, CTA_BYTES // (plan.tiles * tiles.TILE * step)))
        job = _Job(
            tiled=weight.data.data_ptr() + part.before,
            out=out.data_ptr(),
            n=part.rows,
            k=weight.k,
            passes=part.passes,
            ctas=plan.ctas,
            tiles=plan.tiles,
            row_groups=plan.row_groups,
            k_groups=plan.k_groups,
            wide=plan.wide,
            depth=plan.depth,
            steps=plan.steps,
            steps_per_cta=steps_per_cta,
            groups=groups,
            gate_rows=tiles.GATE_ROWS.get(weight.layout, 0),
        )
        grid = (
            part.ctas,
            -(-plan.steps // steps_per_cta) * (plan.k_groups // groups),
            _count(weight) * part.passes,
        )
        rows, pads = plan.tiles * tiles.TILE, tiles.INPUTS * tiles.VALUE_BYTES[weight.kind]
        places = groups * plan.tiles * plan.depth * steps_per_cta
        shared = rows * (steps_per_cta * step + pads + 4) + 8 * places
        self._launch(_variant(weight.kind), "untile", grid, THREADS, [job], shared, pdl=False)

    def _plain_scale(self, weight: Linear, part: slice | None = None) -> Tensor | None:
        """Scales of all rows, or of some features' gates and ups. The division is cached: it is a
        launch of its own, which would cost time in each call."""
        packed = weight.scale
        if packed is None:
            return None
        key = packed, part.start if part else -1
        if key not in self._scales:
            own = packed.view(2, -1)[:, part] if part else packed
            self._scales[key] = own.flatten() / tiles.ACTIVATION_SCALE
        return self._scales[key]


def _parts(weight: Linear, plan: tiles.Schedule) -> Iterator[tuple[slice, _Part]]:
    """The parts of a gated weight, with their features: a pass each, or half of the only pass's
    CTAs."""
    width, features = weight.n // 2, plan.tiles * tiles.TILE // 2
    most = plan.ctas if plan.passes > 1 else -(-plan.ctas // 2)
    for first in range(0, -(-width // features), most):
        of_pass, cta = divmod(first, plan.ctas)
        before = (of_pass * plan.steps * plan.ctas + cta) * plan.step_bytes(weight.kind)
        ctas = min(most, plan.ctas - cta)
        own = slice(first * features, min((first + ctas) * features, width))
        yield own, _Part(1, ctas, before, 2 * (own.stop - own.start))


def _stays(weight: Linear) -> bool:
    """Experts of 4 bits, in tiles dealt in pairs: prefill takes them so (`Ops.grouped`)."""
    return weight.kind in four_bits.KINDS and weight.layout.startswith("experts")


def _count(weight: Linear) -> int:
    """Number of experts of a weight; 1 for other weights."""
    return len(weight.data) if weight.layout.startswith("experts") else 1


def _plain_bytes(weight: Linear, rows: int) -> int:
    """Bytes of so many rows in plain order (per expert, if the weight has experts)."""
    return _count(weight) * rows * weight.k * tiles.VALUE_BYTES[weight.kind]


def _plain_values(values: Tensor, weight: Linear) -> Tensor:
    return values.view(PLAIN_DTYPES[tiles.BITS[weight.kind]]).view(-1, weight.k)
