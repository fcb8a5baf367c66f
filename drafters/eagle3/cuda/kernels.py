"""`ops.DraftOps` as launches of our own kernels (`sources/*.cu`)."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from drafters.eagle3.cuda.ops import DraftLayout, PairNorms, Pending, Vocabulary
from targets.arch import Arch
from targets.cuda.inputs import Input, make_input
from targets.cuda.kernels import Embed, Kernels
from targets.cuda.launch import Variant, address, pointer
from targets.cuda.norms import ROW_THREADS
from targets.cuda.ops import Linear, Rows
from targets.cuda.sampler import CLUSTER
from targets.cuda.variants import variants
from targets.sampling_params import Rules, SamplingTable

SOURCES = Path(__file__).parent / "sources"
LAYOUT = Variant("layout", folder=SOURCES)
SAMPLE = Variant("draft_sample", folder=SOURCES)
INPUTS = {
    kind: Variant("inputs", (("FP8", int(kind == "fp8")),), SOURCES) for kind in ("fp8", "bf16")
}
"""By the kind of weight that reads what they make."""
THREADS = 256
MOST_DRAFTS = 48 * 1024
"""Draft vocabulary that fits into a cluster's registers (draft_sample.cu); among more words, the
target's own sampler chooses."""


class _Pair(Structure):
    _fields_ = (
        ("table", Embed),
        *((name, c_void_p) for name in ("embedding", "feedback", "hidden", "x")),
        *((name, c_int) for name in ("token_stride", "normed", "k_blocks", "block")),
        ("eps", c_float),
    )


class _Guess(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("logits", "ids", "draft_ids", "bias", "history")),
        *(
            (name, c_void_p)
            for name in ("start", "slot", *SamplingTable._fields, "counts", "tokens")
        ),
        *((name, c_int) for name in ("drafts", "vocab", "stride", "width", "j", "shaped")),
    )


def draft_variants(arch: Arch, kinds: set[str]) -> set[Variant]:
    """Of a head of this architecture; its K/V are bf16."""
    return variants(arch, 0, kinds) | {LAYOUT, SAMPLE, *(INPUTS[kind] for kind in kinds)}


class DraftKernels(Kernels):
    """`DraftOps` for one head on the current device."""

    def __init__(self, arch: Arch, max_len: int, kinds: set[str]) -> None:
        super().__init__(arch, max_len, torch.bfloat16, kinds, draft_variants(arch, kinds))

    def lay_out(self, pending: Pending, rows: Rows, k: int, longest: int) -> DraftLayout:
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
        self._launch(LAYOUT, "lay_out", (1, 1, 1), 1024, arguments)
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
        # rely on that, and on each guess (draft_sample.cu, layout.cu) to have seen all before it
        # end
        grid = m, parts, 1
        self._launch(INPUTS[kind], "features", grid, ROW_THREADS, arguments, early=False)
        return x

    def pair(self, table: Linear, tokens: Tensor, h: Tensor, norms: PairNorms, kind: str) -> Input:
        m = len(h)
        x = make_input(m, 2 * table.k, self.device)
        weights = norms.embedding, norms.feedback, norms.hidden
        job = _Pair(
            self.lookup(table, tokens, h),
            *map(address, (*weights, x.data)),
            *(tokens.stride(0), int(norms.residual), x.k_blocks, x.block, self.arch.eps),
        )
        self._launch(INPUTS[kind], "pair", (m, 2, 1), ROW_THREADS, [job])
        return x

    def guess(
        self,
        logits: Tensor,
        known: Vocabulary,
        rules: Rules,
        at: Rows,
        j: int,
        needs_sampler: bool,
    ) -> None:
        (batch, drafts), vocab = logits.shape, rules.bias.shape[1]
        if drafts > MOST_DRAFTS:
            fed = Rows(at.tokens[:, :1], at.start, at.slot)
            spread = self._spread(logits, known.draft_ids)
            chosen = self.choose(spread, rules, fed, needs_sampler)
            self._note(chosen, spread, rules, at, j)
            return
        size = (batch, drafts) if needs_sampler else 0
        counts = torch.empty(size, dtype=torch.int32, device=self.device)
        job = _Guess(
            *map(address, (logits, *known, rules.bias, rules.history, at.start, at.slot)),
            *map(address, (*rules.sampling_params, counts, at.tokens)),
            *(drafts, vocab, rules.history.stride(0), at.tokens.shape[1], j, int(needs_sampler)),
        )
        self._launch(SAMPLE, "guess", (batch * CLUSTER, 1, 1), THREADS, [job])

    def _spread(self, logits: Tensor, draft_ids: Tensor) -> Tensor:
        """[B, D] over draft ids -> [B, 1, V], -inf for what the head does not know."""
        batch, vocab = len(logits), len(draft_ids)
        out = torch.empty((batch, 1, vocab), device=self.device)
        arguments = [*map(pointer, (logits, draft_ids, out))]
        arguments += [c_int(logits.shape[1]), c_int(vocab)]
        self._launch(LAYOUT, "spread", (-(-vocab // THREADS), batch, 1), THREADS, arguments)
        return out

    def _note(self, chosen: Tensor, logits: Tensor, rules: Rules, at: Rows, j: int) -> None:
        """What was `chosen` [B, 1] from logits [B, 1, V] as guess j."""
        batch, width = at.tokens.shape
        tensors = chosen, logits, rules.bias, at.start, at.slot, at.tokens, rules.history
        sizes = batch, logits.shape[-1], width, rules.history.stride(0), j
        arguments = [*map(pointer, tensors), *map(c_int, sizes)]
        self._launch(LAYOUT, "note", (-(-batch // 128), 1, 1), 128, arguments)

    def keep(
        self, pending: Pending, rows: Rows, features: Tensor, chosen: Tensor, accepted: Tensor
    ) -> None:
        batch, width = chosen.shape
        tensors = features, chosen, accepted, rows.slot, *pending
        arguments = [*map(pointer, tensors), c_int(width), c_int(features.shape[-1] // 4)]
        self._launch(LAYOUT, "keep", (batch * width, 1, 1), THREADS, arguments)
