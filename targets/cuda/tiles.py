"""How a weight is dealt to a GPU's multiprocessors.

A tile is 16 rows; every CTA owns equally many and walks all inputs in steps (kernels/gemm.cu). The
order in memory that follows from it is in packing.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count

from targets.cuda.launch import Variant
from targets.cuda.ops import Linear

TILE = 16
INPUTS = 32
"""Inputs of one block: a tile of a block is what a warp loads at once."""
EIGHTHS = 8
"""Most k groups of a weight."""
BITS = {"bf16": 16, "fp8": 8, "w8a8": 8, "int8": 8, "int16": 8, "int4": 4, "uint4": 4, "nvfp4": 4}
"""Bits of a stored value; for int16, of each of its two parts."""
TILE_BYTES = {"bf16": 1024, "fp8": 512, "w8a8": 512, "int8": 544, "int16": 544 + 512}
TILE_BYTES |= {"int4": 288, "uint4": 304, "nvfp4": 288}
"""Bytes of a tile, with the scales of codes and zero points (kernels/tile.cuh)."""
VALUE_BYTES = {"bf16": 2, "fp8": 1, "w8a8": 1, "int4": 2, "uint4": 2, "nvfp4": 2}
"""Bytes of a value in plain order; 4-bit values become float16."""
WARPS = {1: 24, 2: 11, 3: 8}
"""By tiles per warp, preferred first: the most warps of a CTA (gemm.cu adds a producer, and wide.cu
takes two tiles a warp). Many narrow warps catch up faster with a ring that was filled while the
kernel before still ran: 1 % of a cycle."""
NARROW_WARPS = {2: 11, 3: 8, 1: 11}
"""The same for w8a8 weights; w8a8.cu assigns their tiles to its warps itself."""
HEAD_WARPS = {3: 6, 2: 5, 1: 12}
"""The same for a head (int16): where its codes alone are read, each warp converts inputs to f16. So
few that two steps of four blocks fit beside the inputs of 128 tokens."""
STEP_BYTES = {"bf16": 24 << 10, "fp8": 24 << 10, "int16": 75 << 10, "int4": 28 << 10}
BLOCKS = {"bf16": 16, "fp8": 16, "int16": 16, "int4": 32}
"""Per step at most: bytes of weights, and blocks of inputs. Two steps must fit, together with
inputs of 16 tokens (1 KiB per block). Steps of 4-bit weights have fewer bytes, but cost as much."""
DEPTHS = (1, 2, 3, 4)
"""Blocks of inputs per warp and step. kernels/gemm.cu has a loop for each."""
INTEGERS = "int4"
"""The kind of weights that experts multiply as integers (kernels/integers.cuh)."""
GATE_ROWS = {"gated": TILE // 2, "experts_gated": TILE}
"""Consecutive rows of gate, before as many of up: half a tile each, so that a thread has both
halves, or a tile each (moe.cu)."""
GROUPS = ((3 * 132, 8), (4 * 132, 4), (10 * 132, 2))
"""(tiles, k groups): weights of up to so many tiles have so many k groups, as many as there are
warps for if 132 multiprocessors (Hopper) share the tiles. Other machines take the same numbers,
because sums depend on them."""
ACTIVATION_SCALE = 32.0
"""Inputs of e4m3 weights are divided by this (kernels/common.cuh)."""


@dataclass(frozen=True)
class Schedule:
    """How a weight's tiles are dealt to CTAs and warps. Sums depend on `k_groups` only.

    ctas x passes x tiles cover the rows; k_groups x steps x depth blocks cover the inputs. A CTA's
    warps are row_groups (of `wide` tiles each) x k_groups.
    """

    ctas: int
    passes: int
    tiles: int
    wide: int
    row_groups: int
    k_groups: int
    depth: int
    steps: int

    @property
    def warps(self) -> int:
        return self.row_groups * self.k_groups

    def step_bytes(self, kind: str) -> int:
        return self.warps * self.depth * self.wide * TILE_BYTES[kind]


def k_groups(n: int, layout: str) -> int:
    """Number of parts into which k is cut for a weight of n rows. The parts' sums are added as a
    binary tree. n counts all rows, on all devices, so that no cut of the rows changes a sum.
    Weights that are cut along k (row_parallel) have eight parts, which 2, 4 or 8 devices share
    evenly."""
    if layout == "row_parallel" or layout.startswith("experts"):
        return EIGHTHS
    tiles = _tiles(n, layout)
    return next((groups for most, groups in GROUPS if tiles <= most), 1)


def k_stride(weight: Linear) -> int:
    """Distance from one block of a k group to its next. Groups are contiguous in weights that are
    cut along k; else interleaved, so that a step of all groups is a contiguous part of the
    inputs."""
    return 1 if weight.layout == "row_parallel" else weight.k_groups


def padded_inputs(k: int, groups: int = EIGHTHS) -> int:
    """k as it is stored: k groups of whole blocks. Inputs are padded for any weight."""
    return -(-k // (groups * INPUTS)) * groups * INPUTS


@cache
def schedule(n: int, k: int, kind: str, layout: str, groups: int, processors: int) -> Schedule:
    """n rows (of both halves where gated) by k inputs on this many multiprocessors."""
    tiles = _tiles(n, layout)
    warps = {"w8a8": NARROW_WARPS, "int16": HEAD_WARPS}.get(kind, WARPS)
    passes, each, wide = next(_deals(tiles, groups, processors, warps))
    row_groups = each // wide
    blocks = padded_inputs(k, groups) // INPUTS
    step = row_groups * groups * wide * TILE_BYTES[kind]
    depths = [d for d in DEPTHS if blocks % (d * groups) == 0]
    if kind != "w8a8":  # w8a8.cu has one k group in a step
        form = "int4" if BITS[kind] == 4 else kind
        depths = [d for d in depths if d * groups <= BLOCKS[form] and d * step <= STEP_BYTES[form]]
    depth = max(depths, default=1)
    ctas = -(-tiles // (each * passes))
    return Schedule(ctas, passes, each, wide, row_groups, groups, depth, blocks // (groups * depth))


def _tiles(n: int, layout: str) -> int:
    half = GATE_ROWS.get(layout)
    return -(-n // TILE) if half is None else -(-(n // 2) // half) * 2 * half // TILE


def _deals(
    tiles: int, groups: int, processors: int, warps: dict[int, int]
) -> Iterator[tuple[int, int, int]]:
    """Passes, tiles of a CTA and pass, tiles of a warp; the fewest passes first."""
    for passes in count(1):
        least = -(-tiles // (processors * passes))
        deals = ((-(-least // wide) * wide, wide) for wide in warps)
        fit = [(each, wide) for each, wide in deals if each // wide * groups <= warps[wide]]
        if fit:
            yield passes, *min(fit, key=lambda deal: deal[0])


def weight_variant(file: str, kind: str, *macros: tuple[str, int]) -> Variant:
    """The variant of a kernel that reads tiles of this kind (kernels/tile.cuh)."""
    form = {"uint4": "ZEROS", "nvfp4": "E2M1", "int8": "CODES", "int16": "FINE"}
    more = [(form[kind], 1)] if kind in form else []
    return Variant(file, (("BITS", BITS[kind]), *more, *macros))


@cache
def expert_schedule(n: int, k: int, gated: bool) -> Schedule:
    """The schedule of one expert, on any machine: units of two tiles, each with all its inputs."""
    tiles = 2 * -(-(n // 2) // TILE) if gated else -(-n // TILE)
    return Schedule(
        ctas=1,
        passes=-(-tiles // 2),
        tiles=2,
        wide=2,
        row_groups=1,
        k_groups=1,
        depth=expert_inputs(k) // INPUTS,
        steps=1,
    )


def expert_inputs(k: int) -> int:
    """k of an expert as it is stored."""
    return padded_inputs(k, 2)


def schedule_of(weight: Linear, processors: int) -> Schedule:
    kind = weight.dealt or weight.kind
    return plan(weight.n, weight.k, kind, weight.layout, weight.k_groups, processors)


def plan(n: int, k: int, kind: str, layout: str, groups: int, processors: int) -> Schedule:
    if layout.startswith("experts"):
        return expert_schedule(n, k, layout.endswith("gated"))
    return schedule(n, k, kind, layout, groups, processors)


def form_of(weight: Linear) -> str:
    """The kind as which a GEMM reads its tiles."""
    return "int16" if weight.dealt == "int16" and weight.kind == "bf16" else weight.kind
