"""`draft_ops.DraftOps` as launches of our own kernels (`pair.cu`, `draft.cu`)."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_void_p

import torch

from targets.arch import Arch
from targets.cuda.draft_ops import Layout, PairNorms, Pending
from targets.cuda.inputs import Input, make_input
from targets.cuda.kernels import NORM_THREADS, Embed, Kernels, variants
from targets.cuda.launch import Variant, address, pointer
from targets.cuda.ops import Linear, Rows

DRAFT = Variant("draft")
PAIRS = {kind: Variant("pair", (("FP8", int(kind == "fp8")),)) for kind in ("fp8", "bf16")}
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
    """Of a head of this architecture; its K/V are bf16."""
    return variants(arch, 0, kinds) | {DRAFT, *(PAIRS[kind] for kind in kinds)}


class DraftKernels(Kernels):
    """`DraftOps` for one head on the current device."""

    def __init__(self, arch: Arch, max_len: int, kinds: set[str]) -> None:
        super().__init__(arch, max_len, torch.bfloat16, kinds, draft_variants(arch, kinds))

    def lay_out(self, pending: Pending, rows: Rows, k: int, longest: int) -> Layout:
        batch, width = len(rows.slot), pending.chosen.shape[1]
        make = lambda *shape: torch.empty(shape, dtype=torch.int32, device=self.device)  # noqa: E731
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
        self._launch(DRAFT, "lay_out", (1, 1, 1), 1024, arguments)
        return Layout(Rows(tokens, first, slots[0]), last, starts, slots)

    def features(
        self,
        features: torch.Tensor,
        slot: torch.Tensor,
        weight: torch.Tensor | None,
        parts: int,
        kind: str,
    ) -> Input:
        slots, tokens, width = features.shape
        m = len(slot) * tokens
        x = make_input(m, width, self.device)
        arguments = [pointer(t) for t in (features, slot, weight, x.data)]
        arguments += [c_int(n) for n in (width // parts, tokens, slots - 1)]
        arguments += [c_float(self.arch.eps), c_int(x.k_blocks), c_int(x.block)]
        # the first kernel of a call: everything before it has ended when it starts
        grid = m, parts, 1
        self._launch(PAIRS[kind], "features", grid, NORM_THREADS, arguments, early=False)
        return x

    def pair(
        self, table: Linear, tokens: torch.Tensor, h: torch.Tensor, norms: PairNorms, kind: str
    ) -> Input:
        m = len(h)
        x = make_input(m, 2 * table.k, self.device)
        weights = norms.embedding, norms.feedback, norms.hidden
        job = _Pair(
            self.lookup(table, tokens, h),
            *map(address, (*weights, x.data)),
            *(tokens.stride(0), int(norms.residual), x.k_blocks, x.block, self.arch.eps),
        )
        # often the first kernel of a call: see `features`
        self._launch(PAIRS[kind], "pair", (m, 2, 1), NORM_THREADS, [job], early=False)
        return x

    def spread(self, logits: torch.Tensor, draft_ids: torch.Tensor) -> torch.Tensor:
        batch, vocab = len(logits), len(draft_ids)
        out = torch.empty((batch, 1, vocab), device=self.device)
        arguments = [*map(pointer, (logits, draft_ids, out))]
        arguments += [c_int(logits.shape[1]), c_int(vocab)]
        self._launch(DRAFT, "spread", (-(-vocab // THREADS), batch, 1), THREADS, arguments)
        return out

    def note(
        self,
        chosen: torch.Tensor,
        logits: torch.Tensor,
        bias: torch.Tensor,
        at: Rows,
        history: torch.Tensor,
        j: int,
    ) -> None:
        batch, width = at.tokens.shape
        tensors = chosen, logits, bias, at.start, at.slot, at.tokens, history
        sizes = batch, logits.shape[-1], width, history.stride(0), j
        arguments = [*map(pointer, tensors), *map(c_int, sizes)]
        self._launch(DRAFT, "note", (-(-batch // 128), 1, 1), 128, arguments)

    def keep(
        self,
        pending: Pending,
        rows: Rows,
        features: torch.Tensor,
        chosen: torch.Tensor,
        accepted: torch.Tensor,
    ) -> None:
        batch, width = chosen.shape
        tensors = features, chosen, accepted, rows.slot, *pending
        arguments = [*map(pointer, tensors), c_int(width), c_int(features.shape[-1] // 4)]
        self._launch(DRAFT, "keep", (batch * width, 1, 1), THREADS, arguments)
