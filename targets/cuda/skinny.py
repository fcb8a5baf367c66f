"""The skinny GEMM as launches of `kernels/gemm.cu` and `untile.cu`: a part of `Kernels`."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_void_p

import torch

from targets.cuda import tiles
from targets.cuda.inputs import BLOCKS, Input
from targets.cuda.launch import Launch, Variant, address, pointer
from targets.cuda.ops import Linear

RING_BYTES = {8: 168 << 10, 16: 168 << 10, 32: 168 << 10, 64: 200 << 10}
"""By tokens per CTA."""
SHARED_FROM, SHARED_WARPS = 32, 8
"""Tokens per CTA from which two groups of warps share them, where there are no more warps."""
PARTS = 8
"""K groups of the weights that `gemm_spread` takes."""
SPREAD_FROM = 32
"""Tokens per CTA from which their inputs cost more than adding up partial sums."""
AHEAD_BYTES = 64 << 10
"""Weights per CTA on their way to L2 before a kernel's inputs are ready."""
THREADS = 256
UNTILE = Variant("untile")
PLAIN, GATED, LOGITS, PER_LAYER = range(4)
"""What is done with the sums (gemm.cu)."""


class _Job(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("weight", "scale", "x", "out", "inputs")),
        *((name, c_int) for name in ("inputs_stride", "n", "ctas", "tiles", "passes", "steps")),
        *((name, c_int) for name in ("row_groups", "k_groups", "depth", "k_blocks")),
        *((name, c_int) for name in ("stages", "ahead", "rows", "out_stride", "epilogue")),
        ("softcap", c_float),
    )


class _Untile(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("tiled", "out")),
        *((name, c_int) for name in ("n", "k", "passes", "tiles", "row_groups", "k_groups")),
        *((name, c_int) for name in ("wide", "depth", "gated", "fp8")),
    )


def variants(kinds: set[str]) -> set[Variant]:
    """For weights of these kinds."""
    shapes = [(block, wide, 1) for block in BLOCKS for wide in (1, 2, 3)]
    shapes += [(block, wide, 2) for block, wide, _ in shapes if block >= SHARED_FROM]
    return {UNTILE} | {_variant(kind, *shape) for kind in kinds for shape in shapes}


class Skinny:
    """Weights times few tokens, on a GPU with this many multiprocessors."""

    def __init__(self, launch: Launch, processors: int) -> None:
        self._launch, self._processors = launch, processors
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._scales: dict[torch.Tensor, torch.Tensor] = {}  # as packed -> as they were

    def pack(
        self, values: torch.Tensor, scale: torch.Tensor | None, kind: str, layout: str
    ) -> Linear:
        """`Ops.pack`: tiled."""
        if kind == "fp8":
            assert scale is not None
            scale = (scale.float() * tiles.ACTIVATION_SCALE).contiguous()
        n, k = values.shape[-2:]
        data = tiles.tile(values, kind, layout, self._processors)
        return Linear(n, k, kind, data, scale, layout)

    def dense(self, weight: Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
        plan, fp8 = tiles.schedule_of(weight, self._processors), weight.kind == "fp8"
        assert weight.k % 8 == 0, weight.k
        count = len(weight.data) if weight.layout.startswith("experts") else 1
        size = count * weight.n * weight.k * tiles.VALUE_BYTES[weight.kind]
        if len(self._scratch) < size:
            self._scratch = torch.empty(0)  # the old one goes before the new one comes
            self._scratch = torch.empty(size, dtype=torch.uint8, device=weight.data.device)
        job = _Untile(
            *map(address, (weight.data, self._scratch)),
            *(weight.n, weight.k, plan.passes, plan.tiles),
            *(plan.row_groups, plan.k_groups, plan.wide, plan.depth),
            *(int(weight.layout.endswith("gated")), int(fp8)),
        )
        grid = (plan.ctas, plan.steps, count * plan.passes)
        self._launch(UNTILE, "untile", grid, THREADS, [job], early=False)
        values = self._scratch[:size].view(torch.float8_e4m3fn if fp8 else torch.bfloat16)
        return values.view(-1, weight.k), self._plain_scale(weight.scale)

    def _plain_scale(self, packed: torch.Tensor | None) -> torch.Tensor | None:
        """Divided when first asked for: a launch of its own otherwise costs each call."""
        if packed is None:
            return None
        if packed not in self._scales:
            self._scales[packed] = packed.flatten() / tiles.ACTIVATION_SCALE
        return self._scales[packed]

    def linear(self, x: Input, weight: Linear) -> torch.Tensor:
        """`Ops.linear`."""
        plan = tiles.schedule_of(weight, self._processors)
        whole = plan.row_groups == plan.passes == 1 and plan.k_groups == PARTS
        if x.block >= SPREAD_FROM and whole and weight.n % 4 == 0:
            return self._spread(x, weight, plan)
        out = torch.empty((x.rows, weight.n), device=x.data.device)
        self.run(x, weight, out, PLAIN, weight.n)
        return out

    def run(
        self,
        x: Input,
        weight: Linear,
        out: torch.Tensor,
        epilogue: int,
        stride: int,
        inputs: torch.Tensor | None = None,
        softcap: float = 0.0,
    ) -> None:
        """out: float32 rows of `stride`, or an `Input`'s data of `stride` blocks. inputs: what
        PER_LAYER multiplies with."""
        plan = tiles.schedule_of(weight, self._processors)
        stages, shared, ahead = _ring(plan, weight.kind, x.block)
        job = _Job(
            *map(address, (weight.data, weight.scale, x.data, out, inputs)),
            0 if inputs is None else inputs.stride(0),
            *(weight.n, plan.ctas, plan.tiles, plan.passes, plan.steps),
            *(plan.row_groups, plan.k_groups, plan.depth, x.k_blocks),
            *(stages, ahead, x.rows, stride, epilogue, softcap),
        )
        grid = (-(-x.rows // x.block), plan.ctas, 1)
        groups = _column_groups(plan, x.block)
        variant = _variant(weight.kind, x.block, plan.wide, groups)
        self._launch(variant, "gemm", grid, 32 * (plan.warps * groups + 1), [job], shared)

    def _spread(self, x: Input, weight: Linear, plan: tiles.Schedule) -> torch.Tensor:
        """As `run`, bit for bit, with the k groups spread over CTAs: many tokens' inputs are
        then read once for eight CTAs."""
        rows, n = x.rows, weight.n
        new = lambda *shape: torch.empty(shape, device=x.data.device)  # noqa: E731
        partial, out = new(PARTS, rows, n), new(rows, n)
        stage = plan.step_bytes(weight.kind) + plan.depth * x.block * 2 * tiles.INPUTS
        stages = min(RING_BYTES[x.block] // stage, plan.steps)
        job = _Job(
            *map(address, (weight.data, weight.scale, x.data, partial, None)),
            *(0, n, plan.ctas, plan.tiles, plan.passes, plan.steps),
            *(plan.row_groups, plan.k_groups, plan.depth, x.k_blocks),
            *(stages, 0, rows, n, PLAIN, 0.0),
        )
        grid = (-(-rows // x.block), -(-plan.ctas // PARTS) * PARTS, 1)
        groups, shared = _column_groups(plan, x.block), stages * (stage + 16)
        variant = _variant(weight.kind, x.block, plan.wide, groups)
        self._launch(variant, "gemm_spread", grid, 32 * (PARTS * groups + 1), [job], shared)
        arguments = [*map(pointer, (partial, weight.scale, out)), c_int(rows), c_int(n)]
        self._launch(variant, "gather", (-(-n // 1024), rows, 1), THREADS, arguments)
        return out


def _column_groups(plan: tiles.Schedule, block: int) -> int:
    return 2 if block >= SHARED_FROM and plan.warps <= SHARED_WARPS else 1


def _variant(kind: str, block: int, wide: int, groups: int) -> Variant:
    tokens = ("NT", block // 8 // groups), ("CG", groups)
    return Variant("gemm", (("FP8", int(kind == "fp8")), *tokens, ("TW", wide)))


def _ring(plan: tiles.Schedule, kind: str, block: int) -> tuple[int, int, int]:
    """Stages of the ring, its bytes, and steps to prefetch beyond it. A ring takes most of a
    multiprocessor: two CTAs on one would leave another without any."""
    step = plan.step_bytes(kind)
    stage = step + plan.k_groups * plan.depth * block * 2 * tiles.INPUTS
    stages = max(2, min(RING_BYTES[block] // stage, plan.steps * plan.passes))
    return stages, stages * stage + 16 * stages, AHEAD_BYTES // step
