"""The certified head as launches of `screen.cu` and `rescore.cu` beside the skinny GEMM: a part of
`Kernels`. What it does, and why it may: certified.py."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_void_p
from math import sqrt

import torch
from torch import Tensor

from targets.cuda import certified, int8, tiles
from targets.cuda.gemm import LOGITS, PLAIN, Gemm
from targets.cuda.inputs import Input
from targets.cuda.launch import Launcher, Variant, address
from targets.cuda.ops import Choosing, Linear, NarrowHead, Rows
from targets.sampling_params import SamplingTable

SCREEN, RESCORE = Variant("screen"), Variant("rescore")
ROOM = 4096
"""Candidates of a row at most."""
SCREEN_CTAS = SCREEN_THREADS = certified.MOST_TOP_K
"""Of a row."""
WARPS, RING_BYTES = 4, 32 << 10
"""Of a CTA of rescore.cu, each with a tile of candidates, and what is on its way to a warp."""
TABLE = SamplingTable._fields[:-1]
"""What screening reads of it: nothing is counted."""


class _ScreenJob(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("logits", "error", "x", "bias", "start", "slot")),
        *((name, c_void_p) for name in TABLE),
        *((name, c_void_p) for name in ("reached", "found", "count")),
        *((name, c_int) for name in ("vocab", "tokens", "shaped", "room")),
        *((name, c_int) for name in ("k_blocks", "block")),
        *((name, c_float) for name in ("softcap", "ties", "safety", "more", "longest")),
    )


class _RescoreJob(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("weight", "x", "found", "count", "logits")),
        *((name, c_int) for name in ("room", "vocab", "ctas", "tiles", "steps")),
        *((name, c_int) for name in ("row_groups", "k_groups", "wide", "depth", "x_bytes")),
        ("softcap", c_float),
    )


class Candidates:
    def __init__(self, launch: Launcher, gemm: Gemm, processors: int) -> None:
        self._launch, self._gemm, self._processors = launch, gemm, processors

    def narrow(self, values: Tensor) -> NarrowHead | None:
        """`Ops.narrow_head`."""
        if len(values) % int8.WORDS:
            return None
        narrow, error = int8.quantise(values)
        return NarrowHead(self._gemm.pack_codes(narrow, "plain"), error)

    def logits(
        self,
        x: Input,
        heads: tuple[Linear, NarrowHead],
        softcap: float | None,
        rows: Rows,
        choosing: Choosing,
    ) -> Tensor:
        """`Ops.candidates`."""
        head, narrow = heads
        out, found, count = self.screened(x, narrow, softcap, rows, choosing)
        self._rescore(x, head, softcap, (found, count), out)
        epilogue = LOGITS if softcap else PLAIN
        guard = {"certified": count, "room": ROOM}
        self._gemm.run(x, head, out, epilogue, head.n, softcap=softcap or 0.0, **guard)
        return out

    def screened(
        self, x: Input, narrow: NarrowHead, softcap: float | None, rows: Rows, choosing: Choosing
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [M, V] of -inf, the candidates [M, ROOM] in any order, and how many there are
        [M]: below 0 where that is not certified, above ROOM where not all are there."""
        rules, needs_sampler = choosing
        head, m, device = narrow.weight, x.rows, x.data.device
        out = torch.empty((m, head.n), device=device)
        self._gemm.run(x, head, out, PLAIN, head.n)
        found = torch.empty((m, ROOM), dtype=torch.int32, device=device)
        count = torch.empty(m, dtype=torch.int32, device=device)
        reached = torch.empty((m, certified.MOST_TOP_K), device=device)
        table = [getattr(rules.sampling_params, name) for name in TABLE]
        job = _ScreenJob(
            *map(address, (out, narrow.error, x.data, rules.bias, rows.start, rows.slot)),
            *map(address, table),
            *map(address, (reached, found, count)),
            *(head.n, rows.tokens.shape[1], int(needs_sampler), ROOM),
            *(x.k_blocks, x.block),
            *(softcap or 0.0, certified.TIES * (softcap or 0.0)),
            *(int8.SAFETY, certified.MORE / sqrt(head.k), certified.LONGEST),
        )
        for name in ("bound", "screen"):
            self._launch(SCREEN, name, (SCREEN_CTAS, m, 1), SCREEN_THREADS, [job])
        return out, found, count

    def _rescore(
        self,
        x: Input,
        head: Linear,
        softcap: float | None,
        candidates: tuple[Tensor, Tensor],
        out: Tensor,
    ) -> None:
        plan = tiles.schedule_of(head, self._processors)
        job = _RescoreJob(
            *map(address, (head.data, x.data, *candidates, out)),
            *(ROOM, head.n, plan.ctas, plan.tiles, plan.steps),
            *(plan.row_groups, plan.k_groups, plan.wide, plan.depth, 2 * tiles.INPUTS * x.block),
            softcap or 0.0,
        )
        grid = ROOM // (tiles.TILE * WARPS), x.rows, 1
        row = plan.k_groups * plan.steps * plan.depth * 2 * tiles.INPUTS
        self._launch(RESCORE, "rescore", grid, 32 * WARPS, [job], WARPS * RING_BYTES + row)
