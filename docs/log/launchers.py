"""What a launch costs with cuda-bindings (`targets/cuda/launch.py`), cuda.core and CuPy, whether each
takes a ctypes Structure, what each costs to import, and CuPy's bandwidth beside our kernel's.

    PYTHONPATH=. OUT=/tmp python3 docs/log/launchers.py       # on a Hopper GPU
"""

import ctypes, json, os, sys, time, tempfile
from pathlib import Path
import torch
from targets.cuda.launch import Library, Variant, launch, pointer, cached_binary, compile_variant

SRC = r"""
struct Job { int* out; int n, a, b, c; float f; };
extern "C" __global__ void with_struct(const __grid_constant__ Job job) { if (threadIdx.x == 0) atomicAdd(job.out, job.a); }
extern "C" __global__ void with_args(int* out, int n, int a, float f) { if (threadIdx.x == 0) atomicAdd(out, a); }
"""
folder = Path(tempfile.mkdtemp())
(folder / "probe.cu").write_text(SRC)
out = torch.zeros(1, dtype=torch.int32, device="cuda")
torch.cuda.synchronize()
variant = Variant("probe", folder=folder)
lib = Library({variant}, folder / "cache")


class Job(ctypes.Structure):
    _fields_ = (
        ("out", ctypes.c_void_p),
        ("n", ctypes.c_int),
        ("a", ctypes.c_int),
        ("b", ctypes.c_int),
        ("c", ctypes.c_int),
        ("f", ctypes.c_float),
    )


N = 20000
res = {}


def timed(name, fn):
    for _ in range(2000):
        fn()
    torch.cuda.synchronize()
    best = []
    for _ in range(7):
        t = time.perf_counter()
        for _ in range(N // 10):
            fn()
        dt = (time.perf_counter() - t) / (N // 10)
        torch.cuda.synchronize()
        best.append(dt * 1e6)
    res[name] = sorted(best)[3]
    print(name, round(res[name], 3), "us per launch", flush=True)


stream = torch.cuda.current_stream().cuda_stream
ks, ka = lib.kernel(variant, "with_struct"), lib.kernel(variant, "with_args")


def ours_struct():
    launch(ks, (1, 1, 1), 32, [Job(out.data_ptr(), 1, 1, 1, 1, 1.0)], stream)


def ours_args():
    launch(
        ka,
        (1, 1, 1),
        32,
        [pointer(out), ctypes.c_int(1), ctypes.c_int(1), ctypes.c_float(1)],
        stream,
    )


timed("ours, struct", ours_struct)
timed("ours, arguments", ours_args)
try:
    import cuda.core as core

    res["cuda.core"] = core.__version__
    from cuda.core import Device, LaunchConfig, ObjectCode, launch as core_launch

    dev = Device()
    dev.set_current()
    code = ObjectCode.from_cubin(compile_variant(variant))
    cs, ca = code.get_kernel("with_struct"), code.get_kernel("with_args")

    class S:
        def __cuda_stream__(self):
            return (0, stream)

    st = S()
    from cuda.core import Stream

    try:
        st = Stream.from_handle(stream)
    except Exception as e:
        print("from_handle", e)

    def core_args():
        core_launch(
            st,
            LaunchConfig(grid=1, block=32, programmatic_stream_serialization=True),
            ca,
            out.data_ptr(),
            ctypes.c_int(1),
            ctypes.c_int(1),
            ctypes.c_float(1),
        )

    timed("cuda.core, arguments", core_args)
    config = LaunchConfig(grid=1, block=32, programmatic_stream_serialization=True)

    def core_kept():
        core_launch(
            st, config, ca, out.data_ptr(), ctypes.c_int(1), ctypes.c_int(1), ctypes.c_float(1)
        )

    timed("cuda.core, arguments, config kept", core_kept)
    try:

        def core_struct():
            core_launch(st, config, cs, Job(out.data_ptr(), 1, 1, 1, 1, 1.0))

        before = int(out.item())
        core_struct()
        torch.cuda.synchronize()
        res["cuda.core takes a Structure"] = int(out.item()) == before + 1
        timed("cuda.core, struct", core_struct)
    except Exception as e:
        res["cuda.core takes a Structure"] = f"{type(e).__name__}: {e}"
    print("structure:", res["cuda.core takes a Structure"])
except Exception as e:
    res["cuda.core failed"] = f"{type(e).__name__}: {e}"
    print(res["cuda.core failed"])
try:
    import cupy, numpy as np

    mod = cupy.RawModule(code=SRC, options=("-std=c++17",))
    k = mod.get_function("with_args")
    kst = mod.get_function("with_struct")
    view = cupy.from_dlpack(out)
    s = cupy.cuda.ExternalStream(stream)

    def cu():
        with s:
            k((1,), (32,), (view, np.int32(1), np.int32(1), np.float32(1)))

    timed("cupy, arguments", cu)
    dt = np.dtype(
        [
            ("out", np.uint64),
            ("n", np.int32),
            ("a", np.int32),
            ("b", np.int32),
            ("c", np.int32),
            ("f", np.float32),
        ],
        align=True,
    )

    def cust():
        with s:
            kst((1,), (32,), (np.array((out.data_ptr(), 1, 1, 1, 1, 1.0), dt)[()],))

    try:
        timed("cupy, struct", cust)
    except Exception as e:
        res["cupy struct"] = str(e)
        print("cupy struct", e)
    from targets.cuda.bandwidth import stream_bandwidth

    red = cupy.ReductionKernel("uint64 x", "uint64 y", "x", "a ^ b", "y = a", "0", "xored")
    data = cupy.empty((16 << 30) // 8, dtype=cupy.uint64)
    data[:] = 3
    best = 9e9
    for _ in range(10):
        a, b = cupy.cuda.Event(), cupy.cuda.Event()
        a.record()
        red(data)
        b.record()
        b.synchronize()
        best = min(best, cupy.cuda.get_elapsed_time(a, b) / 1e3)
    res["cupy bandwidth"] = (16 << 30) / best
    del data
    cupy.get_default_memory_pool().free_all_blocks()
    res["our bandwidth"] = stream_bandwidth(16 << 30)
    print("bandwidth TB/s", res["cupy bandwidth"] / 1e12, res["our bandwidth"] / 1e12)
except Exception as e:
    res["cupy failed"] = f"{type(e).__name__}: {e}"
    print(res["cupy failed"])
import subprocess


def took(code):
    t = []
    for _ in range(5):
        a = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=False)
        t.append(time.perf_counter() - a)
    return sorted(t)[2]


base = took("import torch")
for name in ("cuda.bindings.driver, cuda.bindings.nvrtc", "cuda.core", "cupy"):
    res[f"import {name}, s beside torch"] = took(f"import torch, {name}") - base
json.dump(res, open(os.environ["OUT"] + "/launch.json", "w"), indent=1)
print(json.dumps(res, indent=1))
