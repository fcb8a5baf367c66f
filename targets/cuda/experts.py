"""Mixture of experts as launches of `kernels/route.cu` and `moe.cu`: a part of `Kernels`."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_void_p
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec.core.errors import UserError
from targets.arch import Arch, MoeSpec
from targets.cuda import gemm, tiles
from targets.cuda.launch import Launcher, Variant, pointer
from targets.cuda.ops import Linear, Rows

if TYPE_CHECKING:
    from targets.cuda.inputs import Input

THREADS = 256
WARPS = THREADS // 32
TOKENS = 8
"""Columns of an MMA; a CTA takes up to AT_ONCE such blocks of an expert's tokens together."""
AT_ONCE = 2
MOST_EXPERTS, MOST_PICKED = 256, 32
"""What `pick` has registers for, and lanes."""
FILL = 1600
"""CTAs to aim at: four times what a Hopper GPU holds at once."""
ROUTE = Variant("route")


class _ExpertsJob(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("weight", "scale", "x", "out", "numbers")),
        *((name, c_int) for name in ("n", "units", "blocks", "experts", "pairs", "top_k")),
        *((name, c_int) for name in ("k_blocks", "block", "row_groups", "k_groups", "parts")),
        ("out_stride", c_int),
    )


def variants(arch: Arch, kinds: set[str]) -> set[Variant]:
    """None for architectures without experts. Raises UserError for what the kernels don't fit."""
    moes = {layer.moe for layer in arch.layers if layer.moe}
    for moe in moes:
        if moe.experts > MOST_EXPERTS or moe.top_k > MOST_PICKED:
            raise UserError(
                f"this model picks {moe.top_k} of {moe.experts} experts, the kernels at most "
                f"{MOST_PICKED} of {MOST_EXPERTS}: run it with --device cpu"
            )
    return {ROUTE, *map(_variant, kinds)} if moes else set()


def pick(
    launch: Launcher, logits: Tensor, per_expert: Tensor, rows: Rows, moe: MoeSpec, factor: float
) -> tuple[Tensor, Tensor]:
    """The router's choice from logits [M, E], which are multiplied by `factor` first."""
    m = len(logits)
    numbers = torch.empty((m, moe.top_k), dtype=torch.int32, device=logits.device)
    shares = torch.empty((m, moe.top_k), device=logits.device)
    tensors = logits, per_expert, rows.tokens, rows.slot, numbers, shares
    arguments: list[Any] = [*map(pointer, tensors)]
    arguments += [*map(c_int, (moe.experts, moe.top_k, rows.tokens.shape[1])), c_float(factor)]
    launch(ROUTE, "pick", (m, 1, 1), 32, arguments)
    return numbers, shares


def run(
    launch: Launcher, x: Input, chosen: tuple[Tensor, Tensor], gate_up: Linear, down: Linear
) -> Tensor:
    """Three kernels: gate and up of every (row, rank) pair, down, and the sum over ranks."""
    numbers, shares = chosen
    pairs, device = numbers.numel(), numbers.device
    width, inputs = gate_up.n // 2, tiles.expert_inputs(down.k)
    # inputs that only pad k meet weights of zero, and must not be NaN
    make = torch.empty if inputs == width else torch.zeros
    gated = make((pairs, inputs), dtype=torch.int16, device=device)
    parts = torch.empty((pairs, down.n), device=device)
    out = torch.empty((len(numbers), down.n), device=device)
    # no other launch between these two: `down` reads `numbers` before it waits
    _experts(launch, "gate_up", gate_up, x.data, (x.k_blocks, x.block), numbers, gated)
    _experts(launch, "down", down, gated, (inputs // tiles.INPUTS, 1), numbers, parts)
    tensors = parts, shares, numbers, out
    arguments = [*map(pointer, tensors), c_int(down.n), c_int(numbers.shape[1])]
    grid = (len(numbers), -(-down.n // (4 * THREADS)), 1)
    launch(ROUTE, "combine", grid, THREADS, arguments)
    return out


def _experts(
    launch: Launcher,
    name: str,
    weight: Linear,
    x: Tensor,
    blocked: tuple[int, int],
    numbers: Tensor,
    out: Tensor,
) -> None:
    """blocked: 32-input blocks of x, and tokens per block."""
    count, units = weight.data.shape[:2]
    rows, top_k = numbers.shape
    blocks = tiles.expert_inputs(weight.k) // tiles.INPUTS
    # where parts of k are short, a warp has two
    k_warps = min(weight.k_groups, WARPS if blocks >= 5 * WARPS else WARPS // 2)
    row_groups = WARPS // k_warps
    scale = None if weight.scale is None else weight.scale.data_ptr()
    job = _ExpertsJob(
        *(weight.data.data_ptr(), scale, x.data_ptr(), out.data_ptr(), numbers.data_ptr()),
        *(weight.n, units, blocks, count, rows * top_k, top_k, *blocked),
        *(row_groups, k_warps, weight.k_groups, out.shape[1]),
    )
    active = min(count, rows * top_k)
    grid = (_ctas(-(-units // row_groups), active), active, 1)
    launch(_variant(weight.kind), name, grid, THREADS, [job], _shared(rows, job))


def _ctas(groups: int, active: int) -> int:
    """CTAs per expert: each takes as many groups of units as any, and all of them fill the GPU a
    few times. Which CTA takes a group is nothing to its arithmetic."""
    wanted = max(1, FILL // active)
    return -(-groups // -(-groups // wanted))


def _shared(rows: int, job: _ExpertsJob) -> int:
    """The pairs of one expert, and the sums of all parts of k but the first."""
    at_once = 1 if rows <= TOKENS else AT_ONCE
    sums = (job.k_groups - 1) * job.row_groups * 2 * at_once * 32 * 16
    return -(-job.pairs // 4) * 16 + sums


def _variant(kind: str) -> Variant:
    return gemm.weight_variant("moe", kind)
