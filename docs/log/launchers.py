"""What a launch costs with cuda-bindings (`targets/cuda/launch.py`), cuda.core and CuPy, which of
them takes a ctypes Structure, and how fast CuPy reads beside our own bandwidth kernel.

    PYTHONPATH=. python3 docs/log/launchers.py       # on a Hopper GPU with cuda.core and CuPy
"""

from __future__ import annotations

import ctypes
import json
import tempfile
import time
from collections.abc import Callable
from ctypes import c_float, c_int, c_void_p
from pathlib import Path

import cupy
import numpy as np
import torch
from cuda.core import Device, LaunchConfig, ObjectCode, Stream, launch as core_launch

from targets.cuda.bandwidth import stream_bandwidth
from targets.cuda.launch import Launcher, Library, Variant, compile_variant, pointer

SOURCE = """
struct Job { int* out; int a, b, c; float f; };
extern "C" __global__ void whole(const __grid_constant__ Job job) { *job.out = job.a; }
extern "C" __global__ void apart(int* out, int a, int b, float f) { *out = a; }
"""
FIELDS = (("out", c_void_p), ("a", c_int), ("b", c_int), ("c", c_int), ("f", c_float))
LAUNCHES = 2000
REPEATS = 7
SIZE = 16 << 30


class Job(ctypes.Structure):
    _fields_ = FIELDS


def microseconds(one: Callable[[], object]) -> float | str:
    """Of a launch, the median of REPEATS; or why it can't be."""
    try:
        one()
    except Exception as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    samples = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for _ in range(LAUNCHES):
            one()
        samples.append((time.perf_counter() - started) / LAUNCHES * 1e6)
        torch.cuda.synchronize()
    return round(sorted(samples)[REPEATS // 2], 2)


def cupy_bandwidth() -> float:
    """Bytes per second of a ReductionKernel, the best of ten."""
    read = cupy.ReductionKernel("uint64 x", "uint64 y", "x", "a ^ b", "y = a", "0", "read_all")
    data, best = cupy.ones(SIZE // 8, dtype=cupy.uint64), float("inf")
    for _ in range(10):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        read(data)
        end.record()
        end.synchronize()
        best = min(best, cupy.cuda.get_elapsed_time(begin, end) / 1e3)
    del data
    cupy.get_default_memory_pool().free_all_blocks()
    return SIZE / best


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    (folder / "probe.cu").write_text(SOURCE)
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    where, stream = out.data_ptr(), torch.cuda.current_stream().cuda_stream
    variant = Variant("probe", folder=folder)
    launch = Launcher(Library({variant}, folder / "cache"))
    Device().set_current()
    code, core_stream = ObjectCode.from_cubin(compile_variant(variant)), Stream.from_handle(stream)
    config = LaunchConfig(grid=1, block=32, programmatic_stream_serialization=True)
    core_whole, core_apart = code.get_kernel("whole"), code.get_kernel("apart")
    module = cupy.RawModule(code=SOURCE, options=("-std=c++17",))
    cupy_whole, cupy_apart = module.get_function("whole"), module.get_function("apart")
    kinds = (np.uint64, np.int32, np.int32, np.int32, np.float32)
    struct = np.dtype([(n, k) for (n, _), k in zip(FIELDS, kinds, strict=True)], align=True)
    plain, narrow = (c_int(1), c_int(1), c_float(1)), (np.int32(1), np.int32(1), np.float32(1))
    given, one = (where, 1, 1, 1, 1.0), ((1,), (32,))
    costs = {
        "cuda-bindings, struct": lambda: launch(variant, "whole", (1, 1, 1), 32, [Job(*given)]),
        "cuda-bindings, apart": lambda: launch(
            variant, "apart", (1, 1, 1), 32, [pointer(out), c_int(1), c_int(1), c_float(1)]
        ),
        "cuda.core, struct": lambda: core_launch(core_stream, config, core_whole, Job(*given)),
        "cuda.core, apart": lambda: core_launch(core_stream, config, core_apart, where, *plain),
        "cupy, struct": lambda: cupy_whole(*one, (np.array(given, struct)[()],)),
        "cupy, apart": lambda: cupy_apart(*one, (np.uint64(where), *narrow)),
    }
    found: dict[str, float | str] = {name: microseconds(one) for name, one in costs.items()}
    found["bandwidth, cupy"], found["bandwidth, ours"] = cupy_bandwidth(), stream_bandwidth(SIZE)
    print(json.dumps(found, indent=1))


main()
