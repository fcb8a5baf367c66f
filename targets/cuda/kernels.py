"""The operations as launches of our own kernels (`kernels/*.cu`): `ops.Ops` on a Hopper GPU.

Nothing here waits for the device or reads results from it, so all of it can be captured in a CUDA
graph. Outputs come from torch's allocator; kernels are launched on torch's current stream.
"""

from __future__ import annotations

from collections.abc import Set
from ctypes import Structure, c_float, c_int, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from targets.arch import Arch, MoeSpec
from targets.cuda import attention, candidates, device, experts, gemm, sampler, tiles, untile, w8a8
from targets.cuda.gemm import GATED, LOGITS, PER_LAYER, PLAIN
from targets.cuda.inputs import Input, make_input
from targets.cuda.launch import Launcher, Library, Variant, address, keep_stacks_small, pointer
from targets.cuda.norms import Mixture, Norms
from targets.cuda.ops import AttentionLayer, Chosen, DenseBranch, Linear, RoutedBranch, Rows
from targets.cuda.variants import ROW_THREADS, norm_variant, variants
from targets.cuda.w8a8 import Parts

THREADS = 256


class Embed(Structure):
    """`Embed` of kernels/hidden.cuh."""

    _fields_ = (
        *((name, c_void_p) for name in ("table", "row", "tokens", "h")),
        *((name, c_int) for name in ("vocab", "hidden", "ctas", "tiles", "steps")),
        *((name, c_int) for name in ("row_groups", "k_groups", "wide", "depth")),
        ("factor", c_float),
    )


class Gpu(NamedTuple):
    """What runs kernels: multiprocessors, bytes of memory that it reads in a cycle of theirs."""

    device: torch.device
    launch: Launcher
    processors: int
    bytes_per_cycle: float


class Kernels:
    """`ops.Ops` for one architecture on the current device."""

    k_groups = tiles.EIGHTHS
    """Of row_parallel weights."""
    multiplies_whole = True
    """As in `Ops`."""

    def __init__(
        self,
        arch: Arch,
        max_len: int,
        kv: torch.dtype,
        kinds: set[str],
        more: Set[Variant] = frozenset(),
    ) -> None:
        """max_len: positions. kv: the cache's dtype. kinds: of the weights. more: variants to
        compile besides."""
        self.arch = arch
        kv8 = int(kv == torch.float8_e4m3fn)
        needed = variants(arch, kv8, kinds) | more
        self.device, self._launch, self.processors, rate = self._gpu(needed)
        self._gemm = gemm.Gemm(self._launch, self.processors, rate, arch.moe is not None)
        self.pack, self.pack_codes = self._gemm.pack, self._gemm.pack_codes
        plain = untile.Untile(self._launch, self.processors)
        self.dense, self.dense_parts = plain.dense, plain.dense_parts
        self.with_plain = plain.with_plain
        self._w8a8 = w8a8.W8A8(self._launch, self.processors, self.k_groups)
        self._norm = norm_variant("bf16", arch.hidden)
        norms = Norms(self._launch, arch.eps)
        self.norm, self.norm_moe = norms.norm, norms.norm_moe
        self.experts = experts.Experts(self._launch, self._gemm, arch, self.processors)
        self.grouped = self.experts.grouped
        self._attention = attention.Attention(
            self._launch, arch, max_len, kv8, self.device, self.processors, self.k_groups
        )
        self.store = self._attention.store
        self.sampler = sampler.Sampler(self._launch, self.device)
        self.choose = self.sampler.choose
        certified = candidates.Candidates(self._launch, self._gemm, self.processors, self.device)
        self.heads, self.candidates = certified.heads, certified.logits
        self.screened = certified.screened

    def _gpu(self, needed: set[Variant]) -> Gpu:
        """The current one, with these kernels."""
        gpu = torch.device("cuda", torch.cuda.current_device())
        torch.zeros(1, device=gpu)  # torch makes the context that modules are loaded into
        keep_stacks_small(gpu.index)
        properties = torch.cuda.get_device_properties(gpu)
        launch, rate = Launcher(Library(needed)), device.bytes_per_cycle(properties)
        return Gpu(gpu, launch, properties.multi_processor_count, rate)

    def linear(self, x: Input, weight: Linear) -> Tensor:
        return (self._w8a8 if weight.kind == "w8a8" else self._gemm).linear(x, weight)

    def branch(self, x: Input, weight: Linear) -> Tensor | Parts:
        if weight.kind == "w8a8":
            return self._w8a8.branch(x, weight)
        return self._gemm.linear(x, weight)

    def attention(self, qkv: Tensor, layer: AttentionLayer, rows: Rows, kind: str) -> Input:
        x = self._attention.run(qkv, layer, rows, kind)
        return self._w8a8.quantise(x.data) if kind == "w8a8" else x

    def embed(self, head: Linear, rows: Rows, texts: Tensor | None = None) -> Tensor:
        m = rows.tokens.numel()
        h = torch.empty((m, head.k), device=self.device)
        stride = 0 if texts is None else texts.stride(0)
        feed = *map(pointer, (texts, rows.start, rows.slot)), c_int(stride)
        arguments = [self.lookup(head, rows.tokens, h), *feed, c_int(rows.tokens.shape[1])]
        # the first kernel of a call: everything before it has ended when it starts
        self._launch(self._norm, "embed", (m, 1, 1), ROW_THREADS, arguments, pdl=False)
        return h

    def lookup(self, head: Linear, tokens: Tensor, h: Tensor) -> Embed:
        """The head's own table by tokens, and rows h [M, H]."""
        assert (head.kind, head.layout) == ("bf16", "plain"), head.kind
        plan = tiles.schedule_of(head, self.processors)
        return Embed(
            table=address(head.data),
            row=address(head.scale),
            tokens=address(tokens),
            h=address(h),
            vocab=head.n,
            hidden=head.k,
            ctas=plan.ctas,
            tiles=plan.tiles,
            steps=plan.steps,
            row_groups=plan.row_groups,
            k_groups=plan.k_groups,
            wide=plan.wide,
            depth=plan.depth,
            factor=torch.tensor(head.k**0.5, dtype=torch.bfloat16).item(),
        )

    def gated(self, x: Input, gate_up: Linear, kind: str, pdl_inputs_ready: bool = False) -> Input:
        """pdl_inputs_ready: as in `gemm.Gemm.run`."""
        if gate_up.kind == "w8a8":
            return self._w8a8.quantise(self._w8a8.gated(x, gate_up))
        out = make_input(x.rows, gate_up.n // 2, self.device, self.k_groups)
        gating = {"silu": self.arch.silu, "out_groups": out.k_groups}
        gating |= {"f16": kind != "bf16", "pdl_inputs_ready": pdl_inputs_ready}
        self._gemm.run(x, gate_up, out.data, GATED, out.k_blocks, **gating)
        return out

    def gated_per_layer(
        self, x: Input, gate: Linear, inputs: Tensor, layer: int, kind: str
    ) -> Input:
        out = make_input(x.rows, gate.n, self.device)
        of_layer = inputs[:, layer * gate.n :]
        self._gemm.run(x, gate, out.data, PER_LAYER, out.k_blocks, of_layer)
        return out

    def head(self, x: Input, table: Linear, softcap: float | None) -> Tensor:
        out = torch.empty((x.rows, table.n), device=self.device)
        self._gemm.run(x, table, out, LOGITS if softcap else PLAIN, table.n, softcap=softcap or 0.0)
        return out

    def per_layer_inputs(self, mixed: Tensor, table: Tensor, norm: Tensor, rows: Rows) -> Tensor:
        arch, m = self.arch, len(mixed)
        width, layers = arch.per_layer_input, len(arch.layers)
        out = torch.empty((m, layers * width), device=self.device)
        factors = [float(torch.tensor(v).to(table.dtype)) for v in (arch.hidden**-0.5, width**0.5)]
        arguments = [pointer(t) for t in (mixed, table, norm, rows.tokens, out)]
        arguments += [c_int(layers), c_int(width), c_int(arch.per_layer_vocab), c_float(arch.eps)]
        arguments += [c_float(factor) for factor in factors]
        grid = (m, -(-layers // 8), 1)
        self._launch(self._norm, "per_layer_inputs", grid, THREADS, arguments)
        return out

    def mixture(
        self, dense: DenseBranch, routed: RoutedBranch, rows: Rows, moe: MoeSpec
    ) -> Mixture:
        """With few rows, kernels that do not depend on each other run side by side: the dense
        branch begins beside the router, and ends before the experts or beside them."""
        chosen, beside = self.experts.route(*routed[:3], rows, moe)
        if experts.are_sorted(rows.tokens.shape[1], routed.gate_up.kind):
            return self._mixture_of_many(dense, routed, chosen)
        few = dense.x.block in gemm.FEW and dense.down.kind != "w8a8"
        x = self.gated(dense.x, dense.gate_up, dense.down.kind, pdl_inputs_ready=beside and few)
        if few and experts.come_first(x.rows, routed.down.kind):
            outputs = self.experts.run(routed.x, chosen, routed.gate_up, routed.down)
            # x was there before the experts' second kernel could start
            branch = self._gemm.linear(x, dense.down, pdl_inputs_ready=True)
        else:
            down = dense.down
            if few:
                branch = self._gemm.linear(x, down, pdl_trigger_late=True)
            else:
                branch = self.branch(x, down)
            outputs = self.experts.run(routed.x, chosen, routed.gate_up, routed.down, few)
        return Mixture(branch, dense.norm, outputs, routed.norm)

    def _mixture_of_many(self, dense: DenseBranch, routed: RoutedBranch, chosen: Chosen) -> Mixture:
        outputs = self.experts.run_sorted(routed.x, chosen, routed.gate_up, routed.down)
        x = self.gated(dense.x, dense.gate_up, dense.down.kind)
        return Mixture(self.branch(x, dense.down), dense.norm, outputs, routed.norm)
