"""Linear layers of e4m3 by e4m3 as launches of `kernels/w8a8.cu` and `quantise.cu`: a part of
`Kernels`.

Weights lie as the skinny GEMM's do (`packing.py`) and have a scale per output channel. Inputs get a
scale per token as they come (dynamically); those of row_parallel weights one per token and k group,
so that a device that has a part of k needs no other's maximum.
"""

from __future__ import annotations

from ctypes import Structure, c_int, c_void_p
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import torch
from torch import Tensor

from targets.cuda import tiles
from targets.cuda.inputs import NARROW_BLOCKS, Input, make_narrow_input
from targets.cuda.launch import SHARED_LIMIT, Launcher, Variant, address, pointer
from targets.cuda.ops import Linear

AT_ONCE = 128
"""Most tokens per CTA with which a warp has registers for two tiles, or for two k groups' sums."""
WARPS = 12
PIECES = 12
"""Most pieces of a step's weights that the producers copy, each from one CTA of the deal."""
BARRIERS = 16
"""Bytes of a stage's two barriers."""
ADD_THREADS = 256
"""Threads per CTA of `add_groups`."""
QUANTISE_THREADS = 1024
"""Threads per CTA of `quantise`."""
WIDEST = 3 * 8 * QUANTISE_THREADS
"""What a CTA of quantise.cu holds of a row."""
PLAIN = 0
"""Epilogue (w8a8.cu): sums are scaled and stored as float32."""
GATED = 1
"""Epilogue: gates and ups are combined and stored as f16."""
PART = 2
"""Epilogue: sums of a part of k are stored unscaled."""
AROUND = Variant("quantise")


class _W8A8Job(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("weight", "scale", "x", "x_scale", "out")),
        *((name, c_int) for name in ("n", "ctas", "steps", "row_groups", "k_groups", "wide")),
        *((name, c_int) for name in ("runs", "run", "take", "share")),
        *((name, c_int) for name in ("k_blocks", "k_stride", "stages", "rows", "epilogue")),
        *((name, c_int) for name in ("blocks", "items")),
    )


class KGroups(Structure):
    """`Parts` as the norms read them (narrow.cuh)."""

    _fields_ = (("parts", c_void_p), ("scale", c_void_p), ("count", c_int))


@dataclass(frozen=True)
class Parts:
    """Sums of parts of k [parts, M, n] float32, scaled by the inputs' scales, and the weight's
    scale [n]."""

    sums: Tensor
    scale: Tensor | None

    @property
    def shape(self) -> torch.Size:
        """The output's shape."""
        return self.sums.shape[1:]


@dataclass(frozen=True)
class Share:
    """What a CTA of w8a8.cu takes: up to `take` row groups of one of `runs` runs of `run` each, and
    `share` k groups of them, with `tiles_per_warp` tiles per warp. Sums do not depend on these
    numbers."""

    runs: int
    run: int
    take: int
    share: int
    tiles_per_warp: int

    @property
    def ctas(self) -> int:
        """CTAs for all rows."""
        return self.runs * -(-self.run // self.take)


@cache
def share_out(plan: tiles.Schedule, apart: bool, block: int, blocks: int, processors: int) -> Share:
    """The quickest way to share a weight's rows for `blocks` blocks of tokens. apart: k groups have
    sums of their own."""
    share = min(2, plan.k_groups) if apart else plan.k_groups
    most = WARPS * (2 if block <= AT_ONCE and not apart else 1) // plan.wide
    owners = plan.ctas * plan.passes
    total = owners * plan.row_groups

    def cost(choice: Share) -> tuple[float, int]:
        """In tiles, of which a start and the inputs cost some too. Warps multiply four at a
        time."""
        count = choice.ctas * (plan.k_groups // share) * blocks
        each = choice.run / -(-choice.run // choice.take)  # row groups of a CTA, on average
        whole = -(-each * plan.wide // 4) * 4 if block >= AT_ONCE else each * plan.wide
        return -(-count // processors) * (whole + 2 + block // 64), -count

    def made(runs: int, run: int, take: int) -> Share:
        return Share(runs, run, take, share, 1 if take * plan.wide <= WARPS else 2)

    # a take has pieces of so many CTAs of the deal
    takes = [take for take in range(1, most + 1) if -(-(take - 1) // plan.row_groups) < PIECES]
    choices = [made(1, total, take) for take in takes]
    choices += [made(owners, plan.row_groups, take) for take in takes if take <= plan.row_groups]
    return min(choices, key=cost)


def as_groups(parts: Parts) -> KGroups:
    return KGroups(
        parts=address(parts.sums),
        scale=address(parts.scale),
        count=len(parts.sums),
    )


def variants(blocks: tuple[int, ...] = NARROW_BLOCKS) -> set[Variant]:
    """The variants for all weights, with inputs in blocks of so many tokens."""
    multiply = {
        _variant(block, depth, tiles_per_warp)
        for block, depth, tiles_per_warp in product(blocks, tiles.DEPTHS, (1, 2))
        if tiles_per_warp == 1 or block <= AT_ONCE
    }
    return {AROUND} | multiply


class W8A8:
    """Launches w8a8.cu on a GPU with this many multiprocessors."""

    def __init__(self, launch: Launcher, processors: int, k_groups: int = tiles.EIGHTHS) -> None:
        """k_groups: of a row_parallel weight."""
        self._launch, self._processors, self._k_groups = launch, processors, k_groups

    def quantise(self, rows: Tensor) -> Input:
        """rows [M, k] f16 of value / 32, for a row_parallel weight."""
        m, k = rows.shape
        assert k % 8 == 0 and k <= WIDEST, k
        x = make_narrow_input(m, k, rows.device, self._k_groups)
        # the kernel writes a scale for each of eight groups, also for those that aren't there
        scale = torch.empty((tiles.EIGHTHS, m), device=rows.device)
        x = replace(x, scale=scale[: self._k_groups])
        each = x.k_blocks * tiles.INPUTS // self._k_groups
        arguments = [pointer(t) for t in (rows, x.data, x.scale)]
        arguments += [c_int(size) for size in (k, each, x.k_blocks, x.block)]
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
        device = x.data.device
        if weight.layout != "row_parallel":
            out = torch.empty((x.rows, weight.n), device=device)
            self._multiply(x, weight, out, PLAIN)
            return out
        sums = torch.empty((-(-weight.k_groups // 2), x.rows, weight.n), device=device)
        self._multiply(x, weight, sums, PART)
        return Parts(sums, weight.scale)

    def gated(self, x: Input, gate_up: Linear) -> Tensor:
        """-> rows for `quantise`."""
        out = torch.empty((x.rows, gate_up.n // 2), dtype=torch.float16, device=x.data.device)
        self._multiply(x, gate_up, out, GATED)
        return out

    def _multiply(self, x: Input, weight: Linear, out: Tensor, epilogue: int) -> None:
        plan, blocks = tiles.schedule_of(weight, self._processors), -(-x.rows // x.block)
        own = share_out(plan, epilogue == PART, x.block, blocks, self._processors)
        items = blocks * own.ctas * (plan.k_groups // own.share)
        stages, shared = ring(plan, own, x.block)
        job = _W8A8Job(
            weight=address(weight.data),
            scale=address(weight.scale),
            x=address(x.data),
            x_scale=address(x.scale),
            out=address(out),
            n=weight.n,
            ctas=plan.ctas,
            steps=plan.steps,
            row_groups=plan.row_groups,
            k_groups=plan.k_groups,
            wide=plan.wide,
            runs=own.runs,
            run=own.run,
            take=own.take,
            share=own.share,
            k_blocks=x.k_blocks,
            k_stride=tiles.k_stride(weight),
            stages=stages,
            rows=x.rows,
            epilogue=epilogue,
            blocks=blocks,
            items=items,
        )
        grid = (min(items, self._processors), 1, 1)
        variant = _variant(x.block, plan.depth, own.tiles_per_warp)
        self._launch(variant, "w8a8", grid, threads(plan, own, x.block), [job], shared)


def _variant(block: int, depth: int, tiles_per_warp: int) -> Variant:
    macros = ("TOKENS", block), ("DEPTH", depth), ("TILES_PER_WARP", tiles_per_warp)
    return Variant("w8a8", macros)


def ring(plan: tiles.Schedule, own: Share, block: int) -> tuple[int, int]:
    """Stages of w8a8.cu's ring, and the shared memory of a CTA in bytes."""
    row_group = plan.wide * tiles.TILE_BYTES["w8a8"]
    stage = plan.depth * (own.take * row_group + block * tiles.INPUTS)
    scales = 2 * 4 * block
    stages = min((SHARED_LIMIT - scales) // (stage + BARRIERS), plan.steps * own.share)
    return max(2, stages), max(2, stages) * (stage + BARRIERS) + scales


def threads(plan: tiles.Schedule, own: Share, block: int) -> int:
    """Warps for the tiles, in whole warpgroups, and the producers (w8a8.cu)."""
    tiles_of_cta = own.take * plan.wide
    return 128 * -(-tiles_of_cta // (4 * own.tiles_per_warp)) + 128
