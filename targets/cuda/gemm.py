"""The skinny GEMM as launches of `kernels/gemm.cu` and `wide.cu`: a part of `Kernels`."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_void_p

import torch
from torch import Tensor

from targets.cuda import packing, tiles
from targets.cuda.four_bits import FourBits
from targets.cuda.inputs import BLOCKS, Input
from targets.cuda.int8 import Int16
from targets.cuda.launch import Launcher, Variant, address
from targets.cuda.ops import Linear

RING_BYTES = 160 << 10
"""Most bytes of a CTA's ring for few tokens. With 8 KiB more, a 12B verify of five tokens takes 1 %
longer."""
SHORT_ROWS = 4
"""Most tokens with which the ring of a 4-bit weight is short: more in flight delays all accesses to
L2, and does not fill the ring sooner (docs/performance.md)."""
SHORT_STEPS = 6
"""Steps that a short ring holds."""
SHORT_BYTES = 80 << 10
"""Bytes that a short ring may have in any case."""
CARVEOUT_RING_BYTES = 208 << 10
"""Bytes of a ring that leaves room for other kernels' CTAs: where it could not hold a whole weight,
it holds all steps but one. The next kernel then starts when the first step has been multiplied.
Earlier or later costs 1 to 3 % of a mixture's forward (docs/performance.md)."""
ALONE_BYTES = 116 << 10
"""Shared memory that keeps a second CTA off a multiprocessor: two on one would leave another
multiprocessor without any, or delay the previous kernel, which makes their inputs."""
WIDE_RING_BYTES = 200 << 10
WIDE_FROM = 32
"""Tokens per CTA from which `wide.cu` takes over: inputs then cost as much as weights, and tensor
cores need warpgroups."""
FEW = tuple(block for block in BLOCKS if block < WIDE_FROM)
MANY = tuple(block for block in BLOCKS if block >= WIDE_FROM)
LATE_TRIGGER_ROWS = 8
"""Most tokens with which, where memory is fast, the kernel after a 4-bit weight starts late: when
the copies of all weights have been issued."""
LATE_TRIGGER_BYTES = 256 << 10
"""Fewest bytes per CTA of such a weight. With smaller weights, or wider ones, a late start costs as
much as it gains."""
FAST_RATE = 2000
"""Bytes per cycle from which memory counts as fast: an H200's does, an H100's does not."""
AHEAD_BYTES = 256 << 10
"""Bytes that a CTA prefetches into L2 beyond its ring while the previous kernel still runs."""
PACE = 1.0
"""Share of memory bandwidth at which all CTAs together issue copies until then: with three times as
much in flight, traffic between multiprocessors takes three times as long (docs/performance.md)."""
ROUNDS_ROWS = 4
"""Tokens up to which inputs are copied once per round of the ring (kernels/gemm.cu)."""
BARRIERS = 16
"""Bytes of a stage's two barriers."""
PLAIN = 0
"""Epilogue (linear.cuh): sums are scaled and stored as float32."""
GATED = 1
"""Epilogue: gates and ups are combined and stored as the next weight's input."""
LOGITS = 2
"""Epilogue: as PLAIN, then the softcap."""
PER_LAYER = 3
"""Epilogue: gates are combined with per-layer inputs and stored as the next weight's input."""
TRIGGER_AT_ONCE = 0
"""The next kernel may start at once (linear.cuh)."""
TRIGGER_IN_TURN = 1
"""It may start when all kernels before this one have ended."""
TRIGGER_AFTER_COPIES = 2
"""It may start when the copies of all weights have been issued."""


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
        *((name, c_int) for name in ("silu", "f16", "room", "pdl_trigger")),
        *((name, c_int) for name in ("pdl_inputs_ready", "apart", "alone", "zero")),
    )


def variants(kinds: set[str]) -> set[Variant]:
    """For weights of these kinds; none of w8a8 ones, which w8a8.cu multiplies. int8 are the codes
    of a head, which few rows take, and stand for the head itself, which has one k group."""
    multiplied, whole = kinds - {"w8a8", "int8"}, {"int16"} if "int8" in kinds else set()
    of_few, of_many = kinds - {"w8a8"} | whole, multiplied | whole
    few = {_few(kind, block, wide) for kind in of_few for block in FEW for wide in (1, 2, 3)}
    many = {
        _many(kind, block, depth) for kind in of_many for block in MANY for depth in tiles.DEPTHS
    }
    reduce = {_reduce(kind, block) for kind in multiplied for block in MANY}
    return few | many | reduce


class Gemm:
    """Weights times few tokens, on a GPU with this many multiprocessors that reads so many bytes of
    memory per cycle. mixture: whether the model is a mixture of experts: memory is then idle for
    most of a layer."""

    def __init__(
        self, launch: Launcher, processors: int, bytes_per_cycle: float, mixture: bool = False
    ) -> None:
        self._launch, self._processors = launch, processors
        self._bytes_per_cycle, self._mixture = bytes_per_cycle, mixture
        self._fast = bytes_per_cycle >= FAST_RATE

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
        data = packing.tile(values, kind, layout, groups, self._processors)
        return Linear(n, k, kind, data, scale, layout, groups)

    def pack_codes(self, weight: FourBits, layout: str, groups: int | None = None) -> Linear:
        """`Ops.pack_codes`."""
        n, k = weight.codes.shape[-2:]
        groups = groups or tiles.k_groups(n, layout)
        scale = (weight.row * tiles.ACTIVATION_SCALE).contiguous()
        data = packing.tile_codes(weight, layout, groups, self._processors)
        return Linear(n, k, weight.kind, data, scale, layout, groups)

    def pack_head(self, head: Int16) -> Linear:
        """Pack a head in two parts. Inputs are taken as they are, by its codes alone too."""
        data = packing.tile_head(head, self._processors)
        n, k = head.fine.shape
        return Linear(n, k, "bf16", data, head.narrow.row.contiguous(), dealt="int16")

    def linear(
        self,
        x: Input,
        weight: Linear,
        pdl_trigger_late: bool = False,
        pdl_inputs_ready: bool = False,
    ) -> Tensor:
        """`Ops.linear`. pdl_trigger_late, pdl_inputs_ready: as in `run`."""
        out = torch.empty((x.rows, weight.n), device=weight.data.device)
        self.run(
            x,
            weight,
            out,
            PLAIN,
            weight.n,
            pdl_trigger_late=pdl_trigger_late,
            pdl_inputs_ready=pdl_inputs_ready,
        )
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
        pdl_trigger_late: bool = False,
        pdl_inputs_ready: bool = False,
    ) -> None:
        """out: float32 rows of `stride`, or an `Input`'s data of `stride` blocks and `out_groups` k
        groups. inputs: factors for PER_LAYER. silu: GATED uses SiLU, else tanh GELU; f16: its
        output is f16, else bf16. For few rows only: certified [M], nothing is done if all are 0 to
        `room`; pdl_trigger_late: the next kernel starts only when all kernels before this one have
        ended, and may read their results before it waits; pdl_inputs_ready: x was complete before
        the previous kernel let this one start."""
        assert x.k_groups == (weight.k_groups if weight.layout == "row_parallel" else 1)
        plan, form = tiles.schedule_of(weight, self._processors), tiles.form_of(weight)
        job = _GemmJob(
            out=address(out),
            inputs=address(inputs),
            certified=address(certified),
            inputs_stride=0 if inputs is None else inputs.stride(0),
            out_stride=stride,
            out_groups=out_groups,
            epilogue=epilogue,
            softcap=softcap,
            silu=int(silu),
            f16=int(f16),
            room=room,
            pdl_trigger=self._pdl_trigger(plan, form, x.block, pdl_trigger_late),
            pdl_inputs_ready=int(pdl_inputs_ready),
        )
        self._fill_operands(job, x, weight, plan, form)
        if x.block in FEW:
            self._skinny(x, form, plan, job)
        elif plan.k_groups == 1 and epilogue != PER_LAYER:
            self._wide(x, form, plan, job)
        else:
            self._spread(x, form, plan, job)

    def _fill_operands(
        self, job: _GemmJob, x: Input, weight: Linear, plan: tiles.Schedule, form: str
    ) -> None:
        """The job's fields that follow from the weight, its schedule and x."""
        job.weight, job.scale = address(weight.data), address(weight.scale)
        job.x, job.rows, job.k_blocks = address(x.data), x.rows, x.k_blocks
        job.n, job.k_stride = weight.n, tiles.k_stride(weight)
        job.ctas, job.tiles, job.passes, job.steps = plan.ctas, plan.tiles, plan.passes, plan.steps
        job.row_groups, job.k_groups, job.depth = plan.row_groups, plan.k_groups, plan.depth
        job.ahead, job.pace = self._before(plan, form)
        job.apart = plan.step_bytes(weight.dealt or form)
        job.alone = int(self._still(x.block))

    def _before(self, plan: tiles.Schedule, kind: str) -> tuple[int, int]:
        """How weights are copied until x has arrived: `ahead`, `pace` (linear.cuh)."""
        step = plan.step_bytes(kind)
        return AHEAD_BYTES // step, int(plan.ctas * step / (PACE * self._bytes_per_cycle))

    def _pdl_trigger(
        self, plan: tiles.Schedule, kind: str, block: int, pdl_trigger_late: bool
    ) -> int:
        """When the next kernel starts. pdl_trigger_late: as in `run`."""
        if pdl_trigger_late:
            return TRIGGER_IN_TURN
        waits = _short(kind, block) or self._still(block)
        return TRIGGER_AFTER_COPIES if waits or self._long(plan, kind, block) else TRIGGER_AT_ONCE

    def _still(self, block: int) -> bool:
        """Whether memory is idle for most of a layer."""
        return self._mixture and block <= SHORT_ROWS

    def _max_smem_carveout(self, kind: str, block: int) -> bool:
        """Whether other kernels' CTAs may share a multiprocessor with a linear layer's. With 4-bit
        weights that costs 2 % where memory is slower."""
        return self._still(block) and (kind == "fp8" or self._fast)

    def _long(self, plan: tiles.Schedule, kind: str, block: int) -> bool:
        """Whether the next kernel starts late behind a 4-bit weight of this size."""
        few = tiles.BITS[kind] == 4 and block <= LATE_TRIGGER_ROWS
        size = plan.passes * plan.steps * plan.step_bytes(kind)
        return few and size >= LATE_TRIGGER_BYTES and self._fast

    def _skinny(self, x: Input, form: str, plan: tiles.Schedule, job: _GemmJob) -> None:
        """Up to 16 rows: one launch of gemm.cu, which sums all of k in a CTA."""
        max_smem_carveout = self._max_smem_carveout(form, x.block)
        job.stages, shared = few_stages(plan, form, x.block, max_smem_carveout)
        self._launch(
            _few(form, x.block, plan.wide),
            "gemm",
            (plan.ctas, 1, 1),
            32 * (plan.warps + 1),
            [job],
            shared,
            max_smem_carveout=max_smem_carveout,
        )

    def _wide(self, x: Input, form: str, plan: tiles.Schedule, job: _GemmJob) -> None:
        job.stages, shared = many_stages(plan, form, x.block)
        shares = -(-plan.ctas // plan.k_groups) * plan.k_groups
        grid = (-(-x.rows // x.block), shares, 1)
        variant = _many(form, x.block, plan.depth)
        self._launch(variant, "wide", grid, many_threads(plan, x.block), [job], shared)

    def _spread(self, x: Input, form: str, plan: tiles.Schedule, job: _GemmJob) -> None:
        """The k groups' sums one by one, then added."""
        count, blocks = plan.passes * plan.ctas * plan.tiles, -(-x.rows // x.block)
        size = plan.k_groups, count, blocks, tiles.TILE * x.block
        partial = torch.empty(size, device=x.data.device)
        job.partial = partial.data_ptr()
        self._wide(x, form, plan, job)
        variant = _reduce(form, x.block)
        self._launch(variant, "reduce", (count, blocks, 1), 4 * x.block, [job])


def _few(kind: str, block: int, wide: int) -> Variant:
    return tiles.weight_variant("gemm", kind, ("TOKENS", block), ("TILES_PER_WARP", wide))


def _many(kind: str, block: int, depth: int) -> Variant:
    return tiles.weight_variant("wide", kind, ("TOKENS", block), ("DEPTH", depth))


def _reduce(kind: str, block: int) -> Variant:
    return tiles.weight_variant("gemm_reduce", kind, ("TOKENS", block))


def _short(kind: str, block: int) -> bool:
    return tiles.BITS[kind] == 4 and block <= SHORT_ROWS


def few_stages(
    plan: tiles.Schedule, kind: str, block: int, max_smem_carveout: bool = False
) -> tuple[int, int]:
    """Stages of gemm.cu's ring, and the shared memory of a CTA in bytes. With few tokens, inputs of
    two rounds are kept. Sums of k groups take the ring's place after the only pass; with more
    passes they have memory of their own. max_smem_carveout: `Gemm._max_smem_carveout`."""
    inputs = plan.k_groups * plan.depth * block * 2 * tiles.INPUTS
    stage = plan.step_bytes(kind) + inputs * (2 if block <= ROUNDS_ROWS else 1)
    ring = RING_BYTES
    if _short(kind, block):
        ring = min(ring, max(SHORT_STEPS * stage, SHORT_BYTES))
    steps = plan.steps * plan.passes
    if max_smem_carveout and plan.passes == 1 and ring // stage < steps:
        ring, steps = CARVEOUT_RING_BYTES, steps - 1
    stages = max(2, min(ring // stage, steps))
    sums = (plan.k_groups - 1) * plan.tiles * tiles.TILE * 4 * max(block, 8)
    return stages, max(stages * (stage + BARRIERS) + sums * (plan.passes > 1), sums, ALONE_BYTES)


def many_stages(plan: tiles.Schedule, kind: str, block: int) -> tuple[int, int]:
    """The same for wide.cu."""
    stage = plan.step_bytes(kind) + plan.depth * block * 2 * tiles.INPUTS
    stages = max(2, min(WIDE_RING_BYTES // stage, plan.steps * plan.passes))
    return stages, stages * (stage + BARRIERS)


def many_threads(plan: tiles.Schedule, block: int) -> int:
    """A warp per two tiles, in whole warpgroups, and the producers (wide.cu)."""
    return 128 * -(-plan.k_groups * plan.tiles // 8) + (128 if block == 128 else 32)
