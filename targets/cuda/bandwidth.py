"""How fast this GPU reads: the ceiling that everything else is measured against."""

from __future__ import annotations

from ctypes import c_size_t

import torch

from targets.cuda.launch import Launcher, Library, Variant, pointer


def stream_bandwidth(size: int = 16 << 30) -> float:
    """Bytes per second of a plain read of `size` bytes, the best of ten."""
    data = torch.empty(size, dtype=torch.uint8, device="cuda")
    variant = Variant("bandwidth")
    launch = Launcher(Library({variant}))
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    data.view(torch.int32).random_()
    best = float("inf")
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        arguments = [pointer(data), c_size_t(size // 16), pointer(out)]
        launch(variant, "stream", (528, 1, 1), 512, arguments, pdl=False)
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1000)
    return size / best
