"""`ops.DraftOps` as launches of our own kernels (`sources/*.cu`)."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from drafters.eagle3.cuda.ops import DraftLayout, PairNorms, Pending
from targets.arch import Arch
from targets.cuda.inputs import Input, make_input
from targets.cuda.kernels import Embed, Kernels
from targets.cuda.launch import Variant, address, pointer
from targets.cuda.norms import ROW_THREADS
from targets.cuda.ops import Linear, Rows
from targets.cuda.variants import variants

SOURCES = Path(__file__).parent / "sources"
LAYOUT = Variant("layout", folder=SOURCES)
INPUTS = {
    kind: Variant("inputs", (("FP8", int(kind == "fp8")),), SOURCES) for kind in ("fp8", "bf16")
}
"""By the kind of weight that reads what they make."""
THREADS = 256


class _Pair(Structure):
    _fields_ = (
        ("table", Embed),
        *((name, c_void_p) for name in ("embedding", "feedback", "hidden", "x")),
        *((name, c_int) for name in ("token_stride", "normed", "k_blocks", "block")),
        ("eps", c_float),
    )


def draft_variants(arch: Arch, kinds: set[str]) -> set[Variant]:
    """The kernels of a head of this architecture; its K/V are bf16."""
    return variants(arch, 0, kinds) | {LAYOUT, *(INPUTS[kind] for kind in kinds)}


class DraftKernels(Kernels):
    """`DraftOps` for one head on the current device."""

    def __init__(self, arch: Arch, max_len: int, kinds: set[str]) -> None:
        super().__init__(arch, max_len, torch.bfloat16, kinds, draft_variants(arch, kinds))
        self.guess = self.sampler.guess

    def prepare_rows(self, pending: Pending, rows: Rows, k: int, longest: int) -> DraftLayout:
        batch, width = len(rows.slot), pending.chosen.shape[1]

        def make(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=self.device)

        tokens, first, starts, slots = (
            make(batch, width),
            make(batch),
            make(k, batch),
            make(k, batch),
        )
        last = torch.empty(batch, dtype=torch.int64, device=self.device)
        read = rows.start, rows.slot, pending.chosen, pending.count
        arguments = [*map(pointer, (*read, tokens, first, last, starts, slots))]
        spare = len(pending.count) - 1
        arguments += [c_int(n) for n in (batch, width, k, spare, longest)]
        self._launch(LAYOUT, "prepare_rows", (1, 1, 1), 1024, arguments)
        return DraftLayout(Rows(tokens, first, slots[0]), last, starts, slots)

    def features(
        self, features: Tensor, slot: Tensor, weight: Tensor | None, parts: int, kind: str
    ) -> Input:
        slots, tokens, width = features.shape
        m = len(slot) * tokens
        x = make_input(m, width, self.device)
        arguments = [pointer(t) for t in (features, slot, weight, x.data)]
        arguments += [c_int(n) for n in (width // parts, tokens, slots - 1)]
        arguments += [c_float(self.arch.eps), c_int(x.k_blocks), c_int(x.block)]
        # everything before the first kernel of a cycle has ended when it starts; later steps may
        # rely on that, and on each guess (sample.cu) to have seen all before it end
        grid = m, parts, 1
        self._launch(INPUTS[kind], "features", grid, ROW_THREADS, arguments, pdl=False)
        return x

    def pair(self, table: Linear, tokens: Tensor, h: Tensor, norms: PairNorms, kind: str) -> Input:
        m = len(h)
        x = make_input(m, 2 * table.k, self.device)
        job = _Pair(
            table=self.lookup(table, tokens, h),
            embedding=address(norms.embedding),
            feedback=address(norms.feedback),
            hidden=address(norms.hidden),
            x=address(x.data),
            token_stride=tokens.stride(0),
            normed=int(norms.residual),
            k_blocks=x.k_blocks,
            block=x.block,
            eps=self.arch.eps,
        )
        self._launch(INPUTS[kind], "pair", (m, 2, 1), ROW_THREADS, [job])
        return x

    def ends(self, h: Tensor, mixed: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        out = h.new_empty((2, len(last), h.shape[1]))
        arguments = [*map(pointer, (h, mixed, last, out)), c_int(h.shape[1] // 4)]
        self._launch(LAYOUT, "ends", (len(last), 2, 1), THREADS, arguments)
        return out[0], out[1]

    def keep(
        self, pending: Pending, rows: Rows, features: Tensor, chosen: Tensor, accepted: Tensor
    ) -> None:
        batch, width = chosen.shape
        tensors = features, chosen, accepted, rows.slot, *pending
        sizes = width, pending.chosen.shape[1], features.shape[-1] // 4
        arguments = [*map(pointer, tensors), *map(c_int, sizes)]
        self._launch(LAYOUT, "keep", (batch * width, 1, 1), THREADS, arguments)
