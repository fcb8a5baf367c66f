"""From a .cu file to a running kernel: NVRTC, a cache of binaries, launches with PDL.

cuda-python does all three, so there is one mechanism and no build step. The cache is keyed by the
source, the options, the compiler, the architecture and the driver.
"""

from __future__ import annotations

import ctypes
import hashlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from specdec.core.errors import UserError
from specdec.core.kept import kept_folder
from specdec.core.writing import beside

SOURCES = Path(__file__).parent / "kernels"
ARCHITECTURE = "sm_90a"
DIGEST_BYTES = 32
SHARED_LIMIT = 227 * 1024
"""Bytes of dynamic shared memory that a Hopper CTA may have, once it is allowed to."""
STACK_BYTES = 256
"""Stack of a thread; a GPU may run 270,336 threads at once. Kernels with a stack size known at
compile time, like ours and the libraries', get what they need in any case."""


@dataclass(frozen=True)
class Variant:
    """One .cu file with its macros, such as ("gemm", (("BITS", 8), ("TOKENS", 5)))."""

    file: str
    macros: tuple[tuple[str, int], ...] = ()
    folder: Path = SOURCES
    """Where the file lies: a drafter brings its own. Headers are the target's."""

    @property
    def source(self) -> Path:
        return self.folder / f"{self.file}.cu"

    @property
    def options(self) -> list[str]:
        defines = [f"-D{name}={value}" for name, value in self.macros]
        return [f"-arch={ARCHITECTURE}", "-std=c++17", *defines]


def compile_variant(variant: Variant) -> bytes:
    """The variant's cubin for sm_90a. Raises UserError with the compiler's log."""
    nvrtc = _import("nvrtc")
    source = variant.source.read_text()
    headers = {file.name.encode(): file.read_bytes() for file in _headers()}
    name = f"{variant.file}.cu".encode()
    result, program = nvrtc.nvrtcCreateProgram(
        source.encode(), name, len(headers), list(headers.values()), list(headers)
    )
    _demand(nvrtc, result, "nvrtcCreateProgram")
    options = [option.encode() for option in variant.options]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        size = nvrtc.nvrtcGetProgramLogSize(program)[1]
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise UserError(f"{variant.file}.cu does not compile: {log.decode().strip()}")
    size = nvrtc.nvrtcGetCUBINSize(program)[1]
    binary = b" " * size
    nvrtc.nvrtcGetCUBIN(program, binary)
    return binary


def _headers() -> list[Path]:
    return sorted(SOURCES.glob("*.cuh"))


def cached_binary(variant: Variant, folder: Path, driver: int) -> bytes:
    """From the cache, else compiled and kept. A damaged one is compiled again."""
    nvrtc = _import("nvrtc")
    digest = hashlib.sha256()
    for part in (variant.source, *_headers()):
        digest.update(part.read_bytes())
    digest.update(repr((variant.options, nvrtc.nvrtcVersion()[1:], driver)).encode())
    file = folder / f"{variant.file}-{digest.hexdigest()[:24]}.cubin"
    if (kept := _kept(file)) is not None:
        return kept
    binary = compile_variant(variant)
    with suppress(OSError):  # a folder that can't be written costs the next start its time, no more
        folder.mkdir(parents=True, exist_ok=True)
        with beside(file) as made:
            made.write_bytes(binary + hashlib.sha256(binary).digest())
    return binary


def _kept(file: Path) -> bytes | None:
    """A kept binary, behind which its digest stands; None where it is damaged or not there."""
    try:
        whole = file.read_bytes()
    except OSError:
        return None
    binary, digest = whole[:-DIGEST_BYTES], whole[-DIGEST_BYTES:]
    return binary if binary and hashlib.sha256(binary).digest() == digest else None


class Library:
    """The kernels of a set of variants on the current device, compiled side by side."""

    def __init__(self, variants: set[Variant], folder: Path | None = None) -> None:
        cuda = driver()
        folder = folder or kept_folder("kernels")
        version = call(cuda.cuDriverGetVersion())
        ordered = sorted(variants, key=repr)
        with ThreadPoolExecutor() as pool:
            binaries = list(pool.map(lambda v: cached_binary(v, folder, version), ordered))
        self._modules = {
            variant: call(cuda.cuModuleLoadData(binary))
            for variant, binary in zip(ordered, binaries, strict=True)
        }
        self._kernels: dict[tuple[Variant, str], Any] = {}

    def kernel(self, variant: Variant, name: str) -> Any:
        """A kernel's handle, allowed to take as much shared memory as there is."""
        cuda, key = driver(), (variant, name)
        if key not in self._kernels:
            handle = call(cuda.cuModuleGetFunction(self._modules[variant], name.encode()))
            of = cuda.CUfunction_attribute
            static = call(cuda.cuFuncGetAttribute(of.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, handle))
            dynamic = of.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call(cuda.cuFuncSetAttribute(handle, dynamic, SHARED_LIMIT - static))
            self._kernels[key] = handle
        return self._kernels[key]


class Launcher:
    """Launches a library's kernels on torch's current stream."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def __call__(
        self,
        variant: Variant,
        name: str,
        grid: tuple[int, int, int],
        threads: int,
        arguments: list[Any],
        shared: int = 0,
        pdl: bool = True,
        max_smem_carveout: bool = False,
    ) -> None:
        """Launch with ctypes values (or one ctypes Structure). pdl: programmatic dependent launch,
        the kernel may start before the previous one has ended, and waits by itself.
        max_smem_carveout: all of a multiprocessor's memory that can be is shared memory while this
        kernel runs, so that others find room beside it. By default there is as much as the kernel
        itself takes."""
        cuda, kernel = driver(), self._library.kernel(variant, name)
        config = cuda.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared
        config.hStream = torch.cuda.current_stream().cuda_stream
        attributes = [_pdl_attribute()] * pdl + [_max_smem_carveout()] * max_smem_carveout
        config.attrs, config.numAttrs = attributes, len(attributes)
        pointers = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(a) for a in arguments])
        call(cuda.cuLaunchKernelEx(config, kernel, ctypes.addressof(pointers), 0))


@cache
def keep_stacks_small(device: int) -> None:
    """Give back memory that this GPU's context sets apart for all threads' stacks: of 1 KiB each by
    default. Once, before anything is captured: the driver makes them larger for a kernel that needs
    it, and a graph that was captured with larger ones fails in smaller ones."""
    cuda = driver()
    with torch.cuda.device(device):
        call(cuda.cuCtxSetLimit(cuda.CUlimit.CU_LIMIT_STACK_SIZE, STACK_BYTES))


def pointer(tensor: Any | None) -> ctypes.c_void_p:
    """A tensor's device address as an argument; None is null."""
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())


def address(tensor: Any | None) -> int | None:
    """A tensor's device address as a field of a Structure; None is null."""
    return None if tensor is None else tensor.data_ptr()


@cache
def _pdl_attribute() -> Any:
    cuda = driver()
    attribute = cuda.CUlaunchAttribute()
    attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


@cache
def _max_smem_carveout() -> Any:
    cuda = driver()
    attribute = cuda.CUlaunchAttribute()
    of = cuda.CUlaunchAttributeID
    attribute.id = of.CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    most = cuda.CUshared_carveout.CU_SHAREDMEM_CARVEOUT_MAX_SHARED
    attribute.value.sharedMemCarveout = most.value
    return attribute


def driver() -> Any:
    """The CUDA driver's functions."""
    return _import("driver")


@cache
def _import(name: str) -> Any:
    try:
        import importlib

        module = importlib.import_module(f"cuda.bindings.{name}")
    except (ImportError, RuntimeError) as problem:
        raise UserError(
            f"the CUDA backend needs cuda-bindings ({problem}): pip install '.[cuda]' in specdec's "
            "clone"
        ) from None
    return module


def call(answer: tuple) -> Any:
    """The value of a driver call. Raises RuntimeError where the driver reports an error."""
    status, *values = answer
    if status.value != 0:
        raise RuntimeError(f"CUDA driver: {status.name}")
    return values[0] if values else None


def _demand(nvrtc: Any, status: Any, what: str) -> None:
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise UserError(f"{what} failed ({status.name}): pip install nvidia-cuda-nvrtc")
