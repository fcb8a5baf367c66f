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

SCREEN = Variant("screen")
RESCORE = Variant("rescore")
ROOM = 4096
"""Candidates of a row at most."""
SCREEN_CTAS = SCREEN_THREADS = certified.MOST_TOP_K
RESIDENT = 4
"""CTAs of screen.cu that fit on a multiprocessor: all of them must run at once."""
STAGED = 10
"""Quads of a thread of screen.cu, of logits and of biases, in its CTA's shared memory at most."""
RESCORE_THREADS = 256
"""Threads per CTA of rescore.cu."""
RESCORE_CTAS_PER_SM = 4
"""CTAs of rescore.cu per multiprocessor."""
BLOCK_BYTES = 64 + 64 + 8
"""Bytes of its shared memory per 32 inputs: a candidate's values, the inputs, the block's place."""
TABLE = SamplingTable._fields[:-1]
"""What screening reads of it: nothing is counted."""


class _ScreenJob(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("logits", "error", "x", "bias", "start", "slot")),
        *((name, c_void_p) for name in TABLE),
        *((name, c_void_p) for name in ("reached", "found", "count", "turns")),
        *((name, c_int) for name in ("vocab", "rows", "tokens", "shaped", "room")),
        *((name, c_int) for name in ("batch", "k_blocks", "block")),
        *((name, c_float) for name in ("softcap", "ties", "safety", "more", "longest")),
    )


class _RescoreJob(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("weight", "scale", "x", "found", "count", "logits")),
        *((name, c_int) for name in ("room", "vocab", "rows", "ctas", "tiles", "steps")),
        *((name, c_int) for name in ("row_groups", "wide", "depth", "x_bytes")),
        ("softcap", c_float),
    )


class Candidates:
    def __init__(self, launch: Launcher, gemm: Gemm, processors: int, device: torch.device) -> None:
        self._launch, self._gemm, self._processors = launch, gemm, processors
        size = certified.MOST_ROWS, SCREEN_CTAS
        self._reached = torch.zeros(size, dtype=torch.int64, device=device)
        self._turns = torch.zeros(1, dtype=torch.int32, device=device)

    def heads(self, values: Tensor) -> tuple[Linear, NarrowHead | None]:
        """`Ops.heads`; none certified on a part of a GPU that has no room for all of screen.cu."""
        if len(values) % int8.WORDS or self._processors * RESIDENT < SCREEN_CTAS:
            return self._gemm.pack(values, None, "bf16", "plain"), None
        head, error = int8.quantise(values)
        whole = self._gemm.pack_head(head)
        return whole, NarrowHead.of(whole, error)

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
        self._gemm.run(x, head, out, PLAIN, head.n, pdl_trigger_late=True)
        found = torch.empty((m, ROOM), dtype=torch.int32, device=device)
        count = torch.empty(m, dtype=torch.int32, device=device)
        batch, quads = staged(*rows.tokens.shape)
        job = _ScreenJob(
            logits=address(out),
            error=address(narrow.error),
            x=address(x.data),
            bias=address(rules.bias),
            start=address(rows.start),
            slot=address(rows.slot),
            **{name: address(getattr(rules.sampling_params, name)) for name in TABLE},
            reached=address(self._reached),
            found=address(found),
            count=address(count),
            turns=address(self._turns),
            vocab=head.n,
            rows=m,
            tokens=rows.tokens.shape[1],
            shaped=int(needs_sampler),
            room=ROOM,
            batch=batch,
            k_blocks=x.k_blocks,
            block=x.block,
            softcap=softcap or 0.0,
            ties=certified.TIES * (softcap or 0.0),
            safety=int8.SAFETY,
            more=certified.MORE / sqrt(head.k),
            longest=certified.LONGEST,
        )
        room = 16 * SCREEN_THREADS * quads
        self._launch(SCREEN, "screen", (SCREEN_CTAS, 1, 1), SCREEN_THREADS, [job], room)
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
        found, count = candidates
        job = _RescoreJob(
            weight=address(head.data),
            scale=address(head.scale),
            x=address(x.data),
            found=address(found),
            count=address(count),
            logits=address(out),
            room=ROOM,
            vocab=head.n,
            rows=x.rows,
            ctas=plan.ctas,
            tiles=plan.tiles,
            steps=plan.steps,
            row_groups=plan.row_groups,
            wide=plan.wide,
            depth=plan.depth,
            x_bytes=2 * tiles.INPUTS * x.block,
            softcap=softcap or 0.0,
        )
        grid, room = (
            (RESCORE_CTAS_PER_SM * self._processors, 1, 1),
            plan.steps * plan.depth * BLOCK_BYTES,
        )
        self._launch(RESCORE, "rescore", grid, RESCORE_THREADS, [job], room)


def staged(batch: int, tokens: int) -> tuple[int, int]:
    """How many of batch * tokens rows screen.cu's shared memory holds at once, and the quads per
    thread that these rows and their sequences' biases take."""

    def quads(rows: int) -> int:
        return rows + min(batch, (rows + tokens - 2) // tokens + 1)

    most = max(rows for rows in range(1, batch * tokens + 1) if rows == 1 or quads(rows) <= STAGED)
    return most, quads(most)
