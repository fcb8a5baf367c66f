"""What each kernel of a captured forward adds to the end of the one before it, in microseconds:
`specdec bench --backend cuda`'s forwards, each once more under torch's profiler.

    PYTHONPATH=. python docs/log/layers.py OUT.json bench --random gemma-4-31b --backend cuda ...

Kernels start before their predecessors end, so their own durations overlap; their ends don't. Shown
is a layer in the middle and what each kernel adds to the whole forward; OUT.json has all kernels of
each forward, as bench asks for them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from specdec.__main__ import main
from targets.cuda import roofline
from targets.cuda.graphs import Captured

ONCE_A_LAYER = "prepare"
"""In a kernel's name: what every layer's attention begins with."""


def kernels(forward: Callable[[], object]) -> list[tuple[str, float]]:
    """Names, and microseconds from the end of the one before; of one replay."""
    replay = Captured(forward, torch.cuda.graph_pool_handle()).replay
    for _ in range(10):
        replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        replay()
        torch.cuda.synchronize()
    ran = [e for e in seen.events() or () if e.device_type.name == "CUDA"]
    ends = sorted((e.time_range.end, e.name) for e in ran)
    return [(name, end - before) for (before, _), (end, name) in pairwise(ends)]


def middle(ran: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """One layer's."""
    starts = [i for i, (name, _) in enumerate(ran) if ONCE_A_LAYER in name]
    at = len(starts) // 2
    return ran[starts[at] : starts[at + 1]] if len(starts) > 1 else []


def totals(ran: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Of each kernel, the longest first."""
    sums: dict[str, float] = {}
    for name, us in ran:
        sums[name] = sums.get(name, 0.0) + us
    return sorted(sums.items(), key=lambda item: -item[1])


def shown(ran: list[tuple[str, float]]) -> str:
    return " ".join(f"{name} {us:.1f}" for name, us in ran)


def run(out: Path) -> None:
    plain, seen = roofline.forward_samples, []

    def forward_samples(forward: Callable[[], object], device: str) -> list[float]:
        samples = plain(forward, device)
        ran = kernels(forward)
        layer = middle(ran)
        forward, whole = min(samples) * 1e3, sum(us for _, us in layer)
        print(f"{forward:.3f} ms; a layer {whole:.1f} us: {shown(layer)}", file=sys.stderr)
        print(f"{len(ran)} kernels: {shown(totals(ran))}", file=sys.stderr)
        seen.append({"seconds": samples, "kernels": ran})
        out.write_text(json.dumps(seen))
        return samples

    roofline.forward_samples = forward_samples
    main()


if __name__ == "__main__":
    run(Path(sys.argv.pop(1)))
