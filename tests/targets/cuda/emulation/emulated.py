"""Runs CUDA kernels on the CPU: their sources are compiled as C++ with `emulated.h` and run cluster
by cluster.

It is slow and does not model a GPU's memory, but it runs the real sources: it tests what they
compute, in any order of threads, and with early starts (early_starts.py). It supports the inline
PTX in the table below. Not supported: `wide`, `w8a8` and prefill (warpgroup matmuls), and `screen`
(CTAs wait for one another).
"""

from __future__ import annotations

import ctypes
import getpass
import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory, gettempdir, mkdtemp
from typing import Any

import numpy as np
import pytest
import torch

from targets.cuda import kernels, launch
from targets.cuda.device import H200_BYTES_PER_CYCLE
from targets.cuda.kernels import Gpu
from targets.cuda.launch import SOURCES, Variant
from tests.targets.cuda.emulation import early_starts
from tests.targets.cuda.emulation.early_starts import Before, Starts

HEADER = Path(__file__).with_suffix(".h")
FLAGS = "-O1 -std=c++20 -fPIC -fno-strict-aliasing -ffp-contract=off -fno-gnu-unique -w"
"""`-ffp-contract=off`: fused multiply-adds only where the source has them. `-fno-gnu-unique`: each
library has its own static variables."""
LINKED = "-shared", "-Wl,-Bsymbolic"
"""So that a kernel with the name of a system call, such as `accept`, is not replaced by it."""
KEPT = Path(gettempdir(), f"specdec-emulated-{getpass.getuser()}")
"""Folder of compiled kernels, shared by all processes; they take three times as long to compile as
to run, and are compiled again only after a change."""
REPLACED: dict[str, str] = {}
"""Source file -> text that sabotage.py uses in its place."""
FRAGMENTS = "({d}, {{{{{i0}, {i1}, {i2}, {i3}}}, {{{i4}, {i5}}}}})"
SAID = {
    r"griddepcontrol\.wait": "await_earlier_kernels()",
    r"griddepcontrol\.launch_dependents": "let_next_kernel_start()",
    r"cp\.async\.bulk\.prefetch|fence": "",
    r"createpolicy": "{o0} = 0",
    r"bar\.sync": "meet(here().numbered[{i0}], {i1})",
    r"bar\.arrive": "arrive_at(here().numbered[{i0}], {i1})",
    r"barrier\.cluster\.arrive.*wait": "arrive_of_cluster(), await_cluster()",
    r"barrier\.cluster\.arrive": "arrive_of_cluster()",
    r"barrier\.cluster\.wait": "await_cluster()",
    r"mov\.u32 %0, %%cluster_ctarank": "{o0} = here().rank",
    r"mapa\.shared::cluster\.u32": "{o0} = ({i1} + 1) << kPeer | {i0}",
    r"st\.shared::cluster\.u32": "*shared_at<unsigned>({i0}) = {i1}",
    r"st\.shared::cluster\.u64": "*shared_at<unsigned long long>({i0}) = {i1}",
    r"st\.shared::cluster\.f32": "*shared_at<float>({i0}) = {i1}",
    r"mbarrier\.init": "here().barriers[{i0}] = {{int{i1}, int{i1}, 0, 0, {{}}}}",
    r"mbarrier\.arrive\.expect_tx": "arrive_at({i0}, {i1})",
    r"mbarrier\.arrive": "arrive_at({i0})",
    r".*mbarrier\.try_wait": "await_barrier({i0}, {i1})",
    r".*mbarrier\.test_wait": "{o0} = has_passed({i0}, {i1})",
    r"cp\.async\.bulk\.shared::cluster\.global": "copy_bulk({i0}, {i1}, {i2}, {i3})",
    r"cp\.async\.cg\.shared\.global \[%0\], \[%1\], 16, %2": "copy_async({i0}, {i1}, {i2})",
    r"cp\.async\.cg\.shared\.global \[%0\], \[%1\], 16;": "copy_async({i0}, {i1})",
    r"cp\.async\.commit_group": "commit_copies()",
    r"cp\.async\.wait_group": "await_copies({i0})",
    r"cp\.async\.wait_all": "commit_copies(), await_copies(0)",
    r"ld\.shared\.v4\.u32": "(([&](const unsigned* p) {{ {o0} = p[0], {o1} = p[1], {o2} = p[2], "
    "{o3} = p[3]; }})(shared_at<unsigned>({i0})))",
    r"ld\.shared\.v2\.u32": "(([&](const unsigned* p) {{ {o0} = p[0], {o1} = p[1]; }})"
    "(shared_at<unsigned>({i0})))",
    r"ld\.shared\.u32": "{o0} = *shared_at<unsigned>({i0})",
    r"ld\.shared\.u16": "{o0} = *shared_at<uint16_t>({i0})",
    r"ld\.shared\.f32": "{o0} = *shared_at<float>({i0})",
    r"ld\.global\.cg\.s32": "{o0} = *({i0})",
    r"ld\.relaxed\.sys\.global\.v4\.u32": "(([&](const unsigned* p) {{ {o0} = p[0], {o1} = p[1], "
    "{o2} = p[2], {o3} = p[3]; }})({i0}))",
    r"st\.relaxed\.sys\.global\.v4\.f32": "*(float4*)({i0}) = {{{i1}, {i2}, {i3}, {i4}}}",
    r"mov\.u64 %0, %globaltimer": "{o0} = 0",
    r"st\.shared\.f32": "*shared_at<float>({i0}) = {i1}",
    r"st\.shared\.v4\.u32": "*shared_at<uint4>({i0}) = {{{i1}, {i2}, {i3}, {i4}}}",
    r"st\.shared\.v2\.u32 \[%0 \+ 32\]": "*shared_at<uint2>({i0} + 32) = {{{i1}, {i2}}}",
    r"st\.shared\.v2\.u32 \[%0\]": "*shared_at<uint2>({i0}) = {{{i1}, {i2}}}",
    r"cvt\.rn\.f16\.f32": "{o0} = to_half({i0})",
    r"cvt\.rn\.bf16\.f32": "{o0} = to_brain({i0})",
    r"cvt\.rn\.f16x2\.f32": "{o0} = pair_of(to_half({i1}), to_half({i0}))",
    r"cvt\.rn\.bf16x2\.f32": "{o0} = pair_of(to_brain({i1}), to_brain({i0}))",
    r"cvt\.rn\.satfinite\.e4m3x2\.f32": "{o0} = to_e4m3({i0}) << 8 | to_e4m3({i1})",
    r".*cvt\.rn\.f16x2\.e4m3x2": "(([&](unsigned w) {{ {o0} = pair_of(e4m3_as_half(w & 255), "
    "e4m3_as_half(w >> 8 & 255)), {o1} = pair_of(e4m3_as_half(w >> 16 & 255), "
    "e4m3_as_half(w >> 24)); }})({i0}))",
    r".*mov\.b32 %0, \{l, l\}": "(([&](unsigned w) {{ {o0} = pair_of(w, w), "
    "{o1} = pair_of(w >> 16, w >> 16); }})({i0}))",
    r"cvt\.f32\.f16 %0, %1": "{o0} = from_half({i0})",
    r".*cvt\.f32\.f16 %1, b; mov": "(([&](unsigned low_, unsigned high_) {{ "
    "{o0} = from_half(low_), {o1} = from_half(low_ >> 16), {o2} = from_half(high_), "
    "{o3} = from_half(high_ >> 16); }})({i0}, {i1}))",
    r".*cvt\.f32\.f16 %1, [bh]": "(([&](unsigned w) {{ {o0} = from_half(w), "
    "{o1} = from_half(w >> 16); }})({i0}))",
    r".*cvt\.f32\.f16 %0, l": "{o0} = from_half({i0})",
    r"sub\.rn\.f16x2": "{o0} = of_halves([](auto a, auto b, auto) {{ return a - b; }}, {i0}, {i1})",
    r"mul\.rn\.f16x2": "{o0} = of_halves([](auto a, auto b, auto) {{ return a * b; }}, {i0}, {i1})",
    r"fma\.rn\.f16x2": "{o0} = of_halves([](auto a, auto b, auto c) {{ return a * b + c; }}, "
    "{i0}, {i1}, {i2})",
    r"max\.u16x2": "{o0} = larger_of_words({i0}, {i1})",
    r"prmt\.b32 %0, %1, %2, (?P<which>\w+);": "{o0} = permuted({i0}, {i1}, {which})",
    r"prmt\.b32": "{o0} = permuted({i0}, {i1}, {i2})",
    r"mma\.sync.*\.m16n8k16.*\.f16\.f16\.": "mma_of_halves" + FRAGMENTS,
    r"mma\.sync.*\.m16n8k16.*\.bf16\.bf16\.": "mma_of_brains" + FRAGMENTS,
    r"mma\.sync.*\.m16n8k32.*\.s8\.s8\.": "mma_of_bytes" + FRAGMENTS,
}
"""What PTX begins with, and what it is in C++: o, i: its outputs and inputs; d: all outputs."""
_seeds, _starts = Random(0), Starts()


@contextmanager
def one_test(name: str) -> Iterator[None]:
    """Orders of threads are this test's, whatever ran before it, and so is what kernels write."""
    global _starts
    _seeds.seed(name)
    _starts = Starts()
    with _starts.watching():
        yield


def just_written(*tensors: torch.Tensor) -> None:
    """The next kernel launched starts while these are being written, and may not see them before
    it has waited."""
    _starts.just_written(tensors)


class Launcher(launch.Launcher):
    """For tensors of the CPU. Each launch has another order of its threads."""

    def __init__(self) -> None:
        """There is no library of compiled kernels."""

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
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        before = _starts.before(pdl, b"".join(map(bytes, arguments)))
        start = _Start.of(before)
        kernel = getattr(_library(variant), f"emulate_{name}")
        kernel(
            pointers,
            (ctypes.c_int * 3)(*grid),
            threads,
            _seeds.getrandbits(31),
            ctypes.byref(start),
        )
        assert not start.failure, f"{variant} {name}: {start.failure.decode()}"
        assert start.waited or not before.beside, f"{variant} {name}: nobody waits"
        _starts.after(before, bool(start.late))


class _Start(ctypes.Structure):
    """As emulated.h has it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("hidden", "watched")),
        *((name, ctypes.c_int) for name in ("hidden_count", "watched_count", "waited", "late")),
        ("failure", ctypes.c_char_p),
    )

    @classmethod
    def of(cls, before: Before) -> _Start:
        hidden = early_starts.outputs(before.beside)
        pairs = zip(before.tensors, before.copies, strict=True)
        shared = [pair for pair in pairs if before.is_shared(pair[0])]
        each = [(tensor.data_ptr(), tensor.nbytes, copy.data_ptr()) for tensor, copy in shared]
        watched = np.array(each, np.int64).reshape(-1, 3)
        start = cls(hidden.ctypes.data, watched.ctypes.data, len(hidden), len(watched))
        start.kept = hidden, watched
        return start


class Kernels(kernels.Kernels):
    """Of a GPU with eight multiprocessors."""

    def _gpu(self, needed: set[Variant]) -> Gpu:
        return Gpu(torch.device("cpu"), Launcher(), 8, H200_BYTES_PER_CYCLE)


@cache
def _library(variant: Variant) -> ctypes.CDLL:
    source = as_cpp(variant)
    binary = KEPT / f"{variant.file}-{_digest(source + _header().name)}.so"
    if not binary.is_file():
        with TemporaryDirectory(dir=KEPT) as folder:
            made = Path(folder, "kernel.so")
            options = f"-I{_header()}", *LINKED, "-o", str(made), "-x", "c++", "-"
            _compile(source, *options)
            made.replace(binary)
    return ctypes.CDLL(str(binary))


@cache
def _header() -> Path:
    """A folder with the header, compiled: that is a third of each kernel's time."""
    text = HEADER.read_text()
    kept = KEPT / _digest(text + FLAGS)
    if not kept.is_dir():
        KEPT.mkdir(parents=True, exist_ok=True)
        folder = Path(mkdtemp(dir=KEPT))
        copy = folder / HEADER.name
        copy.write_text(text)
        _compile("", "-o", f"{copy}.gch", "-x", "c++-header", str(copy))
        with suppress(OSError):  # another process was first
            folder.rename(kept)
    return kept


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _compile(source: str, *options: str) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to emulate kernels with")
    subprocess.run([compiler, *FLAGS.split(), *options], input=source, text=True, check=True)


def as_cpp(variant: Variant) -> str:
    """A variant's source with all that it includes, and a function for each of its kernels."""
    macros = [f"#define {name} {value}" for name, value in variant.macros]
    text = re.sub(r"#pragma.*", "", _included(variant.source, set()))
    text = re.sub(r"extern __shared__ .*?(\w+) (\w+)\[\];", r"\1* \2 = (\1*)here().memory;", text)
    numbers = count()
    statics = r"__shared__ (?:__align__\(\d+\) )?((?:long )?\w+) ([^;]+);"
    text = re.sub(statics, lambda match: _static(match, next(numbers)), text)
    entries = re.findall(r'extern "C" __global__ void([^{]*?)(\w+)\(((?:[^()])*)\) \{', text)
    lines = [f'#include "{HEADER.name}"', *macros, _translated(text)]
    return "\n".join([*lines, *(_entry(*entry) for entry in entries)])


def _static(match: re.Match[str], number: int) -> str:
    """Variables of a CTA, in a place of its shared memory that is theirs alone."""
    names = re.findall(r"(\w+)(?:\[[^,]*)?", match[2])
    given = " ".join(f"auto& {name} = shared_{number}.{name};" for name in names)
    kind = f"struct Shared_{number} {{ {match[1]} {match[2]}; }};"
    place = f"auto& shared_{number} = shared_static<Shared_{number}>({number});"
    return f"{kind} {place} {given}"


def _entry(attributes: str, name: str, given: str) -> str:
    types = [
        re.sub(r"(const )?__grid_constant__", "", part).rsplit(maxsplit=1)[0]
        for part in given.split(",")
    ]
    found = re.search(r"__cluster_dims__\((\w+), 1, 1\)", attributes)
    cluster = found[1] if found else "1"
    values = ", ".join(f"*({kind.strip()}*)given[{i}]" for i, kind in enumerate(types))
    run = f"run_grid(grid, threads, seed, start, {cluster}, [=] {{ {name}({values}); }})"
    taken = "void** given, const int* grid, int threads, unsigned seed, Start* start"
    return f'extern "C" void emulate_{name}({taken}) {{ {run}; }}'


def _included(file: Path, seen: set[str]) -> str:
    def other(match: re.Match[str]) -> str:
        name = match[1]
        if name in seen:
            return ""
        seen.add(name)
        return _included(SOURCES / name, seen)

    return re.sub(r'#include "([^"]+)"', other, REPLACED.get(file.name) or file.read_text())


def _translated(text: str) -> str:
    parts, done = [], 0
    for match in re.finditer(r"\basm(?: volatile)?\s*\(", text):
        end = _closing(text, match.end())
        parts += [text[done : match.start()], _statement(text[match.end() : end])]
        done = end + 1
    return "".join(parts) + text[done:]


def _closing(text: str, start: int) -> int:
    """Where the parenthesis ends that begins before `start`."""
    depth, quoted = 1, False
    for at in range(start, len(text)):
        quoted ^= text[at] == '"'
        depth += 0 if quoted else {"(": 1, ")": -1}.get(text[at], 0)
        if not depth:
            return at
    raise AssertionError(text[start : start + 80])


def _statement(inner: str) -> str:
    template, *operands = _split(inner, ":")
    said = " ".join("".join(re.findall(r'"((?:[^"\\]|\\.)*)"', template)).split())
    outs, ins = (list(_values(part)) for part in (*operands, "", "")[:2])
    for begin, meant in SAID.items():
        if found := re.match(begin, said):
            names = {f"o{i}": f"({v})" for i, v in enumerate(outs)}
            names |= {f"i{i}": f"({v})" for i, v in enumerate(ins)}
            whole = outs[0].rsplit("[", 1)[0] if outs else ""
            return meant.format(**names, **found.groupdict(), d=whole)
    raise AssertionError(f"no emulation of {said}")


def _values(operands: str) -> Iterator[str]:
    for operand in _split(operands, ","):
        if found := re.match(r'\s*"[^"]*"\s*\((.*)\)\s*$', operand, re.DOTALL):
            yield found[1]


def _split(text: str, separator: str) -> list[str]:
    """At separators that stand in no parentheses and no quotes."""
    parts, depth, quoted = [""], 0, False
    for letter in text:
        quoted ^= letter == '"'
        depth += 0 if quoted else (letter in "([{") - (letter in ")]}")
        if letter == separator and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
