"""Linear layers of e4m3 by e4m3 as launches of `kernels/w8a8.cu` and `quantise.cu`: a part of
`Kernels`.

Inputs get a scale per token as they come (dynamically), weights have one per output channel.
"""

from __future__ import annotations

from ctypes import Structure, c_int, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from targets.cuda import tiles
from targets.cuda.inputs import NARROW_BLOCKS, Input, make_narrow_input
from targets.cuda.launch import SHARED_LIMIT, Launcher, Variant, address, pointer
from targets.cuda.ops import Linear

AT_ONCE = 128
"""Most tokens per CTA of which a warp has registers for two tiles."""
BARRIERS = 16
"""Bytes of a stage's two."""
ADD_THREADS, QUANTISE_THREADS = 256, 1024
WIDEST = 3 * 8 * QUANTISE_THREADS
"""What a CTA of quantise.cu holds of a row."""
PLAIN, GATED, PART = range(3)
"""What becomes of sums (w8a8.cu)."""
AROUND = Variant("quantise")


class _W8A8Job(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("weight", "scale", "x", "x_scale", "out")),
        *((name, c_int) for name in ("n", "ctas", "tiles", "passes", "steps", "k_groups")),
        *((name, c_int) for name in ("k_blocks", "stages", "rows", "epilogue")),
    )


class Groups(Structure):
    """`Parts` as the norms read them (narrow.cuh)."""

    _fields_ = (
        *((name, c_void_p) for name in ("parts", "scale", "x_scale")),
        ("groups", c_int),
    )


@dataclass(frozen=True)
class Parts:
    """The sums of a linear layer's k groups [groups, M, n] float32, and their scales [n], [M]."""

    sums: Tensor
    scale: Tensor | None
    x_scale: Tensor | None

    @property
    def shape(self) -> torch.Size:
        """Of the output."""
        return self.sums.shape[1:]


def as_groups(parts: Parts) -> Groups:
    return Groups(*map(address, (parts.sums, parts.scale, parts.x_scale)), len(parts.sums))


def variants() -> set[Variant]:
    """All that any weight asks for."""
    multiply = {
        _variant(block, depth, together)
        for block in NARROW_BLOCKS
        for depth in tiles.DEPTHS
        for together in (1, 2)
        if together == 1 or block <= AT_ONCE
    }
    return {AROUND} | multiply


class W8A8:
    """On a GPU with this many multiprocessors."""

    def __init__(self, launch: Launcher, processors: int) -> None:
        self._launch, self._processors = launch, processors

    def pack(self, values: Tensor, scale: Tensor | None, kind: str, layout: str) -> Linear:
        """`Ops.pack`: tiled."""
        assert scale is not None
        n, k = values.shape
        data = tiles.tile(values, kind, layout, self._processors)
        return Linear(n, k, kind, data, scale.float().contiguous(), layout)

    def quantise(self, rows: Tensor) -> Input:
        """rows [M, k] f16 of value / 32."""
        m, k = rows.shape
        assert k % 8 == 0 and k <= WIDEST, k
        x = make_narrow_input(m, k, rows.device)
        arguments = [pointer(t) for t in (rows, x.data, x.scale)]
        arguments += [c_int(size) for size in (k, x.k_blocks, x.block)]
        self._launch(AROUND, "quantise", (m, 1, 1), QUANTISE_THREADS, arguments)
        return x

    def linear(self, x: Input, weight: Linear) -> Tensor:
        """`Ops.linear`."""
        made = self.branch(x, weight)
        if isinstance(made, Tensor):
            return made
        out = torch.empty(made.shape, device=x.data.device)
        arguments = [as_groups(made), pointer(out), c_int(weight.n)]
        grid = (-(-weight.n // (4 * ADD_THREADS)), x.rows, 1)
        self._launch(AROUND, "add_groups", grid, ADD_THREADS, arguments)
        return out

    def branch(self, x: Input, weight: Linear) -> Tensor | Parts:
        """`Ops.branch`."""
        plan, device = tiles.schedule_of(weight, self._processors), x.data.device
        if plan.k_groups == 1:
            out = torch.empty((x.rows, weight.n), device=device)
            self._multiply(x, weight, plan, out, PLAIN)
            return out
        sums = torch.empty((plan.k_groups, x.rows, weight.n), device=device)
        self._multiply(x, weight, plan, sums, PART)
        return Parts(sums, weight.scale, x.scale)

    def gated(self, x: Input, gate_up: Linear) -> Tensor:
        """-> rows for `quantise`."""
        plan = tiles.schedule_of(gate_up, self._processors)
        out = torch.empty((x.rows, gate_up.n // 2), dtype=torch.float16, device=x.data.device)
        self._multiply(x, gate_up, plan, out, GATED)
        return out

    def _multiply(
        self, x: Input, weight: Linear, plan: tiles.Schedule, out: Tensor, epilogue: int
    ) -> None:
        together = 2 if plan.passes % 2 == 0 and x.block <= AT_ONCE else 1
        stages, shared = ring(plan, x.block, together)
        job = _W8A8Job(
            *map(address, (weight.data, weight.scale, x.data, x.scale, out)),
            *(weight.n, plan.ctas, plan.tiles, plan.passes, plan.steps, plan.k_groups),
            *(x.k_blocks, stages, x.rows, epilogue),
        )
        grid = (-(-x.rows // x.block), plan.ctas * plan.k_groups, 1)
        variant = _variant(x.block, plan.depth, together)
        self._launch(variant, "w8a8", grid, threads(plan, x.block, together), [job], shared)


def _variant(block: int, depth: int, together: int) -> Variant:
    macros = ("TOKENS", block), ("DEPTH", depth), ("TILES", together)
    return Variant("w8a8", macros)


def ring(plan: tiles.Schedule, block: int, together: int) -> tuple[int, int]:
    """Stages of w8a8.cu's ring, and the shared memory of a CTA in bytes."""
    stage = together * plan.step_bytes("w8a8") // plan.k_groups + plan.depth * block * tiles.INPUTS
    stages = max(2, min(SHARED_LIMIT // (stage + BARRIERS), plan.steps * plan.passes // together))
    return stages, stages * (stage + BARRIERS)


def threads(plan: tiles.Schedule, block: int, together: int) -> int:
    """A warp per tile, in whole warpgroups, and the producers (w8a8.cu)."""
    return 128 * -(-plan.tiles // 4) + (128 if block * together >= 128 else 32)
