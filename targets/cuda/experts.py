"""Mixture of experts as launches of `kernels/route.cu` and `moe.cu`: a part of `Kernels`."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_void_p
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specdec.core.errors import UserError
from targets.arch import Arch, MoeSpec
from targets.cuda import four_bits, gemm, tiles
from targets.cuda.launch import SHARED_LIMIT, Launcher, Variant, address, pointer
from targets.cuda.ops import Chosen, Linear, Rows

if TYPE_CHECKING:
    from targets.cuda.inputs import Input

THREADS = 256
WARPS = THREADS // 32
TOKENS = 1, 8, 16
"""Tokens of an expert that are multiplied together: with one row, at most with few, with many."""
INTEGER_TOKENS = 1, 4, 8, 16
"""The same with integer codes: four tokens fill all columns of an MMA."""
BLOCKS_PER_STAGE = 3
"""32-input blocks of weights per stage of a warp's ring (kernels/moe.cu)."""
BLOCKS_PER_STAGE_BF16 = 2
"""The same with 16-bit weights."""
RING_STAGES = 2
"""Stages of a warp's ring."""
K_SPLITS_PER_WARP = 2
"""Parts of k that a warp of `down` has."""
SORTED_FROM_TOKENS = 129
"""Tokens of a prefill call from which its rows are sorted by expert: then enough of them picked
each expert for grouped.cu."""
SORTED_BLOCK = 16
"""Tokens per block of such rows' inputs, which are gathered row by row."""
ORDER_THREADS = 1024
"""Threads of `order_pairs`."""
GROUPED_ROWS = 64
"""Rows of an expert per CTA of kernels/grouped.cu."""
GROUPED_UNITS = 16
"""Units of an expert's weight per CTA of grouped.cu."""
GROUPED_BLOCKS = 4
"""32-input blocks per stage of its ring."""
GROUPED_BLOCKS_OF_8_BITS = 2
"""The same with weights of 8 bits."""
GROUPED_STAGES = 3
"""Stages of its ring."""
GROUPED_PADDING = 64
"""Bytes between two rows' inputs of a stage."""
MAX_CTAS_PER_SM = 3
"""CTAs of moe.cu per multiprocessor for which registers suffice."""
SHARED_PER_SM = 228 << 10
"""Bytes of shared memory of a multiprocessor."""
SHARED_OVERHEAD = 2560
"""Bytes that each CTA of moe.cu takes beside its dynamic shared memory."""
PAIR_BYTES = 8 + 4
"""Bytes of a pair in a CTA's lists: its entry, and its number."""
BRIEF_ROWS = 4
"""Rows up to which experts' weights are read so quickly that the dense branch may end before they
begin (docs/performance.md)."""
BRIEF_ROWS_OF_4_BITS = 1
"""The same with 4-bit weights."""
MOST_HIDDEN = 3072
"""Most inputs of an expert's gate and up that CTAs have shared memory for."""
MOST_WIDTH = 768
"""The same of its down."""
MOST_EXPERTS = 256
"""Most experts for which `pick` has registers."""
MOST_PICKED = 32
"""Most picks per row: each lane of `pick` stores one."""
ROUTER_CTAS = 8
"""Tiles of the largest router weight that `route` takes: one per CTA."""
ROUTER_GROUPS = 8
"""k groups of a router weight that `route` takes: one per warp."""
ROUTER_BLOCKS = 100
"""Most 32-input blocks of such a weight."""
ROUTER_ROWS = 8, 16
"""Rows of its input that `route` takes: of the variant for few rows, and at most."""


SORTED_KINDS = ("fp8", *four_bits.KINDS)
"""Kinds of experts that grouped.cu multiplies."""


class Routed(NamedTuple):
    """Routed experts' outputs before they are summed by rank: parts [M, top_k, H] float32, not
    written where a row picked no expert; numbers [M, top_k] int32; shares [M, top_k] float32.
    gated: the input of the second kernel; kernels that run beside that one must not be given its
    memory."""

    parts: Tensor
    numbers: Tensor
    shares: Tensor
    gated: Tensor


class _ExpertsJob(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("weight", "scale", "x", "out", "numbers")),
        *((name, c_int) for name in ("n", "units", "blocks", "experts", "pairs", "top_k", "rows")),
        *((name, c_int) for name in ("k_blocks", "block", "row_groups", "k_groups", "parts")),
        *((name, c_int) for name in ("groups", "each", "processors")),
        *((name, c_int) for name in ("out_stride", "f16", "pdl_inputs_ready")),
    )


class _GroupedJob(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("weight", "scale", "x", "out", "ends", "order")),
        *((name, c_int) for name in ("n", "k", "units", "blocks", "experts", "gated")),
        *((name, c_int) for name in ("top_k", "k_blocks", "block")),
    )


class _Pick(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("per_expert", "tokens", "slot", "numbers", "shares")),
        *((name, c_int) for name in ("experts", "top_k", "width")),
        ("factor", c_float),
    )


class _Router(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("weight", "x")),
        *((name, c_int) for name in ("steps", "depth", "tiles", "k_blocks", "block", "rows")),
    )


def variants(arch: Arch, kinds: set[str]) -> set[Variant]:
    """None for architectures without experts. Raises UserError for what the kernels don't fit."""
    moe = arch.moe
    if moe is None:
        return set()
    if moe.experts > MOST_EXPERTS or moe.top_k > MOST_PICKED:
        raise UserError(
            f"this model picks {moe.top_k} of {moe.experts} experts, the kernels at most "
            f"{MOST_PICKED} of {MOST_EXPERTS}: run it with --device cpu"
        )
    if arch.hidden > MOST_HIDDEN or moe.width > MOST_WIDTH:
        raise UserError(
            f"this model's experts have {arch.hidden} inputs and {moe.width} features, the "
            f"kernels take {MOST_HIDDEN} and {MOST_WIDTH} at most: run it with --device cpu"
        )
    found = {_variant(kind, most) for kind in kinds for most in _tokens(kind)}
    found |= {_grouped(kind) for kind in kinds if kind in SORTED_KINDS}
    return {_route(moe, rows) for rows in ROUTER_ROWS} | found


def are_sorted(tokens: int, kind: str) -> bool:
    """Whether rows of prompts of so many tokens, padding included, are sorted by experts of this
    kind."""
    return tokens >= SORTED_FROM_TOKENS and kind in SORTED_KINDS


def come_first(rows: int, kind: str) -> bool:
    """Whether experts of this kind begin before a mixture's dense branch ends."""
    return rows > (BRIEF_ROWS_OF_4_BITS if tiles.BITS[kind] == 4 else BRIEF_ROWS)


class Experts:
    """A mixture's router and experts, of one architecture."""

    def __init__(self, launch: Launcher, linear: gemm.Gemm, arch: Arch, processors: int) -> None:
        self._launch, self._gemm, self._processors = launch, linear, processors
        self._factor = arch.hidden**-0.5

    def route(
        self, x: Input, proj: Linear, per_expert: Tensor, rows: Rows, moe: MoeSpec
    ) -> tuple[Chosen, bool]:
        """One kernel for few rows, else one for the logits [M, E] and one that picks. -> the
        choice, and whether the next kernel starts only when all before the router's have ended."""
        numbers = torch.empty((x.rows, moe.top_k), dtype=torch.int32, device=x.data.device)
        shares = torch.empty((x.rows, moe.top_k), device=x.data.device)
        pick = _Pick(
            per_expert=address(per_expert),
            tokens=address(rows.tokens),
            slot=address(rows.slot),
            numbers=address(numbers),
            shares=address(shares),
            experts=moe.experts,
            top_k=moe.top_k,
            width=rows.tokens.shape[1],
            factor=self._factor,
        )
        plan = tiles.schedule_of(proj, self._processors)
        at_once = x.rows <= ROUTER_ROWS[-1] and _fits(plan)
        if at_once:
            router = _Router(
                weight=address(proj.data),
                x=address(x.data),
                steps=plan.steps,
                depth=plan.depth,
                tiles=plan.ctas,
                k_blocks=x.k_blocks,
                block=x.block,
                rows=x.rows,
            )
            room = tiles.TILE_BYTES["bf16"] + 2 * tiles.INPUTS * x.rows
            shared, grid = _blocks(plan) * room, (ROUTER_CTAS, 1, 1)
            self._launch(
                _route(moe, x.rows), "route", grid, 32 * ROUTER_GROUPS, [pick, router], shared
            )
        else:
            logits = self._gemm.linear(x, proj)
            self._launch(_route(moe), "pick", (x.rows, 1, 1), 32, [pick, pointer(logits)])
        return (numbers, shares), at_once

    def run(
        self,
        x: Input,
        chosen: Chosen,
        gate_up: Linear,
        down: Linear,
        pdl_inputs_ready: bool = False,
    ) -> Routed:
        """Two kernels: gate and up of every (row, rank) pair, then down. pdl_inputs_ready: the
        kernel before lets the first one start only when x and what was chosen are complete."""
        numbers, shares = chosen
        pairs, device = numbers.numel(), numbers.device
        width, inputs = gate_up.n // 2, tiles.expert_inputs(down.k)
        # inputs that only pad k meet weights of zero, and must not be NaN
        make = torch.empty if inputs == width else torch.zeros
        gated = make((pairs, inputs), dtype=torch.int16, device=device)
        parts = torch.empty((*numbers.shape, down.n), device=device)
        # no other launch between these two: `down` reads `numbers` before it waits
        first = _job(gate_up, x.data, (x.k_blocks, x.block), numbers, gated)
        second = _job(down, gated, (inputs // tiles.INPUTS, 1), numbers, parts)
        first.f16, first.pdl_inputs_ready = int(down.kind != "bf16"), int(pdl_inputs_ready)
        self._start("gate_up", first, gate_up.kind)
        self._start("down", second, down.kind)
        return Routed(parts, numbers, shares, gated)

    def run_sorted(self, x: Input, chosen: Chosen, gate_up: Linear, down: Linear) -> Routed:
        """`run` for many rows of a prompt (`are_sorted`), whose inputs are in blocks of
        SORTED_BLOCK."""
        (numbers, shares), device = chosen, x.data.device
        pairs, top_k = numbers.numel(), numbers.shape[1]
        order = torch.empty(pairs, dtype=torch.int32, device=device)
        ends = torch.empty(len(gate_up.data), dtype=torch.int32, device=device)
        gated = torch.empty((pairs, gate_up.n // 2), dtype=torch.int16, device=device)
        parts = torch.empty((*numbers.shape, down.n), device=device)
        arguments = [*map(pointer, (numbers, order, ends)), c_int(pairs), c_int(len(ends))]
        variant = _grouped(gate_up.kind)
        self._launch(variant, "order_pairs", (1, 1, 1), ORDER_THREADS, arguments, pdl=False)
        first = _grouped_job(gate_up, x.data, ends, gated, order)
        first.top_k, first.k_blocks, first.block = top_k, x.k_blocks, x.block
        self._start_grouped("gate_up_sorted", first, gate_up.kind, pairs)
        second = _grouped_job(down, gated, ends, parts, order)
        self._start_grouped("down_sorted", second, down.kind, pairs)
        return Routed(parts, numbers, shares, gated)

    def grouped(self, x: Tensor, ends: Tensor, weight: Linear) -> Tensor:
        """`Ops.grouped`."""
        out = torch.empty((len(x), weight.n), dtype=torch.bfloat16, device=x.device)
        self._start_grouped(
            "grouped", _grouped_job(weight, x, ends, out, None), weight.kind, len(x)
        )
        return out

    def _start_grouped(self, name: str, job: _GroupedJob, kind: str, rows: int) -> None:
        blocks = _grouped_blocks(kind)
        pitch = blocks * 2 * tiles.INPUTS + GROUPED_PADDING
        stage = GROUPED_ROWS * pitch + GROUPED_UNITS * blocks * 2 * tiles.TILE_BYTES[kind]
        grid = -(-job.units // GROUPED_UNITS), -(-rows // GROUPED_ROWS) + job.experts, 1
        room = GROUPED_STAGES * stage
        self._launch(_grouped(kind), name, grid, THREADS, [job], room, pdl=False)

    def _start(self, name: str, job: _ExpertsJob, kind: str) -> None:
        most = next((n for n in _tokens(kind) if job.rows <= n), TOKENS[-1])
        job.processors, shared = self._processors, _shared(job, kind, most)
        grid = _ctas(shared, most) * self._processors, 1, 1
        self._launch(_variant(kind, most), name, grid, THREADS, [job], shared)


def _job(
    weight: Linear, x: Tensor, blocked: tuple[int, int], numbers: Tensor, out: Tensor
) -> _ExpertsJob:
    """blocked: 32-input blocks of x, and tokens per block."""
    (count, units), (rows, top_k) = weight.data.shape[:2], numbers.shape
    job = _ExpertsJob(
        weight=address(weight.data),
        scale=address(weight.scale),
        x=address(x),
        out=address(out),
        numbers=address(numbers),
        n=weight.n,
        units=units,
        blocks=tiles.expert_inputs(weight.k) // tiles.INPUTS,
        experts=count,
        pairs=rows * top_k,
        top_k=top_k,
        rows=rows,
        k_blocks=blocked[0],
        block=blocked[1],
        processors=0,
        out_stride=out.shape[-1],
        f16=0,
        pdl_inputs_ready=0,
    )
    _deal(job, weight.k, weight.k_groups, weight.layout)
    job.groups = -(-units // job.row_groups)
    return job


def _deal(job: _ExpertsJob, k: int, k_groups: int, layout: str) -> None:
    """How a CTA's warps share a unit."""
    job.parts = 1 if layout == "experts_gated" else min(K_SPLITS_PER_WARP, k_groups)
    job.k_groups = k_groups // job.parts
    job.row_groups = WARPS // job.k_groups
    job.each = -(-k // (tiles.INPUTS * k_groups))


def kind_of(dtype: str) -> str:
    """Kind of the experts of a target of this dtype, where its file keeps none otherwise."""
    return {"int4": "int4", "bfloat16": "bf16"}.get(dtype, "fp8")


def most_pairs(arch: Arch, moe: MoeSpec, kind: str) -> int:
    """Pairs of row and rank that fit into a CTA's shared memory beside all else, for experts of
    this kind that are not sorted."""
    taken = []
    for k, layout in ((arch.hidden, "experts_gated"), (moe.width, "experts")):
        job = _ExpertsJob(rows=TOKENS[-1], pairs=0)
        _deal(job, k, tiles.EIGHTHS, layout)
        taken.append(_shared(job, kind, TOKENS[-1]))
    return (SHARED_LIMIT - SHARED_OVERHEAD - max(taken)) // PAIR_BYTES


def _grouped_job(
    weight: Linear, x: Tensor, ends: Tensor, out: Tensor, order: Tensor | None
) -> _GroupedJob:
    return _GroupedJob(
        weight=address(weight.data),
        scale=address(weight.scale),
        x=address(x),
        out=address(out),
        ends=address(ends),
        order=address(order),
        n=weight.n,
        k=weight.k,
        units=weight.data.shape[1],
        blocks=tiles.expert_inputs(weight.k) // tiles.INPUTS,
        experts=weight.data.shape[0],
        gated=int(weight.layout == "experts_gated"),
        top_k=1,
        k_blocks=0,
        block=0,
    )


def _grouped_blocks(kind: str) -> int:
    return GROUPED_BLOCKS_OF_8_BITS if tiles.BITS[kind] == 8 else GROUPED_BLOCKS


def _fits(plan: tiles.Schedule) -> bool:
    """Whether each CTA of `route` has a tile at most, with all of its inputs."""
    single = (plan.passes, plan.tiles, plan.wide, plan.k_groups) == (1, 1, 1, ROUTER_GROUPS)
    return single and plan.ctas <= ROUTER_CTAS and _blocks(plan) <= ROUTER_BLOCKS


def _blocks(plan: tiles.Schedule) -> int:
    """32-input blocks of a router's weight, with padding."""
    return plan.steps * plan.depth * plan.k_groups


def _ctas(shared: int, most: int) -> int:
    """CTAs per multiprocessor, which share its part of the weights."""
    fit = SHARED_PER_SM // (shared + SHARED_OVERHEAD)
    return max(1, min(MAX_CTAS_PER_SM, fit)) if most < TOKENS[-1] else 2


def _shared(job: _ExpertsJob, kind: str, most: int) -> int:
    """Each warp's ring, twice the sums of all parts of k but one, inputs (of integers with the
    scales of their parts), and the pairs by expert."""
    blocks = BLOCKS_PER_STAGE_BF16 if tiles.BITS[kind] == 16 else BLOCKS_PER_STAGE
    ring = WARPS * RING_STAGES * blocks * 2 * tiles.TILE_BYTES[kind]
    fours = -(-most // 4) if kind == tiles.INTEGERS else max(most // 4, 2)
    sums = 2 * (job.k_groups - 1) * job.row_groups * fours * 32 * 16
    inputs = WARPS * min(most, job.rows) * job.parts * job.each * 2 * tiles.INPUTS
    if kind == tiles.INTEGERS:
        inputs += WARPS * K_SPLITS_PER_WARP * fours * 16
    return ring + sums + inputs + job.pairs * PAIR_BYTES


def _grouped(kind: str) -> Variant:
    return tiles.weight_variant("grouped", kind)


def _route(moe: MoeSpec, rows: int = ROUTER_ROWS[-1]) -> Variant:
    most = next(n for n in ROUTER_ROWS if rows <= n)
    return Variant("route", (("EXPERTS_PER_LANE", -(-moe.experts // 32)), ("MAX_ROWS", most)))


def _tokens(kind: str) -> tuple[int, ...]:
    return INTEGER_TOKENS if kind == tiles.INTEGERS else TOKENS


def _variant(kind: str, most: int) -> Variant:
    return tiles.weight_variant("moe", kind, ("TOKENS", most))
