"""How the kernels of a long prefill chunk (`kernels/prefill*.cu`) are launched."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from targets.cuda import four_bits
from targets.cuda.launch import Launcher, Library, Variant
from targets.cuda.prefill_steps import PrefillInput

THREADS = 512
QUADS = 4
"""Most pieces of 4 floats of a row that a thread of prefill.cu holds."""
PACKS = 6
"""Most pieces of 8 narrow values of a row that a thread of prefill.cu holds."""

SOFTMAX = Variant("prefill_softmax")


class PrefillLauncher:
    """Room for results, and launches without programmatic overlap: cuBLAS runs in between."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.run = device, partial(compiled(torch.cuda.current_device()), pdl=False)

    def input(self, rows: int, width: int, kind: str) -> PrefillInput:
        """Room for the input [rows, width] of a weight of this kind."""
        if kind == "bf16":
            return PrefillInput(self.new(rows, width), None)
        if kind in four_bits.KINDS:
            return PrefillInput(
                torch.empty((rows, width), dtype=torch.float16, device=self.device), None
            )
        values = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=self.device)
        return PrefillInput(values, torch.empty(rows, device=self.device))

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=self.device)

    def each_row(
        self, name: str, kind: str, rows: int, pieces: int, most: int, arguments: list[Any]
    ) -> None:
        """One CTA per row, of just as many threads as share its pieces evenly."""
        each = -(-pieces // THREADS)
        assert each <= most, f"{name}: a row of {pieces} pieces, {most * THREADS} fit"
        threads = -(-pieces // each // 32) * 32
        self.run(_rows(kind), name, (rows, 1, 1), threads, arguments)


@cache
def compiled(device: int) -> Launcher:
    """All kernels of a prefill, for this GPU, the current one."""
    assert device == torch.cuda.current_device(), device
    return Launcher(Library(variants()))


def variants() -> set[Variant]:
    """All that the prefill of any model launches."""
    kinds = {_rows(kind) for kind in ("fp8", "bf16", "int4")}
    caches = torch.bfloat16, torch.float8_e4m3fn
    return kinds | {SOFTMAX} | {attention(t, dim) for t in caches for dim in (256, 512)}


def attention(cache: torch.dtype, head_dim: int) -> Variant:
    kv8, widest = int(cache == torch.float8_e4m3fn), 256 if head_dim <= 256 else 512
    return Variant("prefill_attention", (("FP8_CACHE", kv8), ("MAX_HEAD_DIM", widest)))


def _rows(kind: str) -> Variant:
    half = kind in four_bits.KINDS
    return Variant("prefill", (("FP8", int(kind != "bf16" and not half)), ("F16", int(half))))
