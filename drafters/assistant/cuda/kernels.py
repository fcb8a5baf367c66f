"""`ops.AssistantOps` as launches of our own kernels (`sources/*.cu`)."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_void_p
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from drafters.assistant.cuda.ops import DraftLayout, States
from drafters.assistant.cuda.ordered import OrderedHead
from targets.arch import Arch
from targets.cuda.exchange import Inboxes
from targets.cuda.guessing import Guess
from targets.cuda.inputs import Input, make_input
from targets.cuda.kernels import Embed, Kernels
from targets.cuda.launch import Variant, address, pointer
from targets.cuda.norms import ROW_THREADS
from targets.cuda.ops import Linear, Rows
from targets.cuda.ranks import Rank, RankKernels
from targets.cuda.variants import variants

SOURCES = Path(__file__).parent / "sources"
STEPS = {
    kind: Variant("steps", (("FP8", int(kind == "fp8")),), SOURCES) for kind in ("fp8", "bf16")
}
"""By the kind of weight that reads what they make."""
ORDERED = Variant("ordered", (), SOURCES)
ORDERED_THREADS = 256
"""Threads per CTA of ordered.cu."""
ROWS_PER_CTA = 32
"""Rows of a weight that a CTA of ordered.cu scores."""


class _Beside(Structure):
    _fields_ = (
        ("table", Embed),
        *((name, c_void_p) for name in ("slot", "norm", "x")),
        *((name, c_int) for name in ("token_stride", "spare", "k_blocks", "block")),
        ("eps", c_float),
    )


class _Ordered(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("h", "norm", "centroids", "rows", "ids", "fits", "logits")),
        *((name, c_int) for name in ("width", "clusters", "words", "read", "vocab")),
        *((name, c_float) for name in ("eps", "softcap")),
    )


def assistant_variants(arch: Arch, kv8: int, kinds: set[str]) -> set[Variant]:
    """The kernels of an assistant of this architecture. kv8: whether the cache is e4m3."""
    return variants(arch, kv8, kinds) | {ORDERED, *(STEPS[kind] for kind in kinds)}


class _AssistantLaunches(Kernels):
    """What `AssistantOps` has beyond a decoder layer's operations."""

    _steps: Variant

    @property
    def guess(self) -> Guess:
        return self.sampler.guess

    def prepare_rows(self, rows: Rows, k: int, longest: int) -> DraftLayout:
        batch = len(rows.slot)

        def make(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=self.device)

        layout = DraftLayout(make(batch), make(k, batch), make(k, batch))
        arguments = [*map(pointer, (rows.start, rows.slot, *layout))]
        arguments += [c_int(n) for n in (batch, k, longest)]
        self._launch(self._steps, "prepare_rows", (1, 1, 1), 1024, arguments)
        return layout

    def beside(self, table: Linear, tokens: Tensor, states: States, kind: str) -> Input:
        m = len(tokens)
        x = make_input(m, 2 * table.k, self.device)
        job = _Beside(
            table=self.lookup(table, tokens, states.rows),
            slot=address(states.slot),
            norm=address(states.norm),
            x=address(x.data),
            token_stride=tokens.stride(0),
            spare=len(states.rows) - 1,
            k_blocks=x.k_blocks,
            block=x.block,
            eps=self.arch.eps,
        )
        # everything before the first step of a cycle has ended when it starts; later steps may rely
        # on that, and on each guess (sample.cu) to have seen all before it end
        pdl = states.slot is None
        self._launch(STEPS[kind], "beside", (m, 2, 1), ROW_THREADS, [job], pdl=pdl)
        return x

    def ordered(self, h: Tensor, norm: Tensor, head: OrderedHead) -> Tensor:
        (m, width), (clusters, words) = h.shape, head.ids.shape
        assert head.rows.dtype == torch.bfloat16 and width % 8 == 0, (head.rows.dtype, width)
        fits = torch.empty((m, clusters), device=self.device)
        logits = torch.empty((m, head.vocab), device=self.device)
        job = _Ordered(
            h=address(h),
            norm=address(norm),
            centroids=address(head.centroids),
            rows=address(head.rows),
            ids=address(head.ids),
            fits=address(fits),
            logits=address(logits),
            width=width,
            clusters=clusters,
            words=words,
            read=head.read,
            vocab=head.vocab,
            eps=self.arch.eps,
            softcap=head.softcap or 0.0,
        )
        launch = partial(self._launch, ORDERED, threads=ORDERED_THREADS, arguments=[job])
        launch("fit", (-(-clusters // ROWS_PER_CTA), m, 1), shared=4 * width)
        launch("score", (head.read, m, -(-words // ROWS_PER_CTA)), shared=4 * width + 8 * clusters)
        return logits

    def keep(self, states: Tensor, rows: Rows, features: Tensor, accepted: Tensor) -> None:
        batch, width, hidden = features.shape
        arguments = [*map(pointer, (features, accepted, rows.slot, states))]
        arguments += [c_int(width), c_int(hidden // 4)]
        self._launch(self._steps, "keep", (batch, 1, 1), ROW_THREADS, arguments)


class AssistantKernels(_AssistantLaunches):
    """`AssistantOps` for one assistant on the current device."""

    def __init__(self, arch: Arch, positions: int, kv: torch.dtype, kind: str) -> None:
        """kv: the target's cache's dtype; kind: of the linear layers."""
        kinds = {kind, "bf16"}
        more = assistant_variants(arch, int(kv == torch.float8_e4m3fn), kinds)
        super().__init__(arch, positions, kv, kinds, more)
        self._steps = STEPS[kind]


class AssistantRankKernels(RankKernels, _AssistantLaunches):
    """The same for a card that has a part of each layer."""

    def __init__(
        self, rank: Rank, inboxes: Inboxes, positions: int, kv: torch.dtype, kind: str
    ) -> None:
        kinds = {kind, "bf16"}
        more = assistant_variants(rank.own, int(kv == torch.float8_e4m3fn), kinds)
        super().__init__(rank, inboxes, positions, kv, kinds, more)
        self._steps = STEPS[kind]

    def beside(self, table: Linear, tokens: Tensor, states: States, kind: str) -> Input:
        self.begin()
        return super().beside(table, tokens, states, kind)
