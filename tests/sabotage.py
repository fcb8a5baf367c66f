"""Does emulation see it? Kernels with one thing wrong each, which some emulated test must fail on.

Every barrier, wait, `meet`, `pass`, `await` and `arrive` of the emulated sources is dropped once,
one at a time, and `BY_HAND` has more: masks, places off by one, rings, starts. Each runs the tests
that cover its file, with up to `SCHEDULES` schedules. What passes them all is a survivor, and needs
its line in `EXPLAINED`; so has nothing else.

`python -m tests.sabotage` runs all (an hour on two cores); with words, those sites that have one of
them: `python -m tests.sabotage consumers_sync sample.cu`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import pytest

from targets.cuda.launch import SOURCES
from tests.support.places import ROOT
from tests.targets.cuda import runner  # noqa: F401 (what tests import)
from tests.targets.cuda.emulation import emulated, emulated_weights  # noqa: F401 (what tests import)
from tests.targets.cuda.kernel_variants import FILES

SCHEDULES = 3
JOBS = 2
SECONDS = 180
"""Of one test run, which else is killed: a kernel that never ends."""
NOT_COMPILED = 77
"""Exit status."""
POLLS = 20
"""A second."""
CALL = re.compile(
    r"(?<![.\w])(?:__syncthreads|__syncwarp|cluster_sync|consumers_sync|(?:meet|pass|await|await_asked)"
    r"(?:<[^>]*>)?|copies_done|wait_for_previous|arrive)\s*\(|asm volatile\(\"barrier\.cluster"
)
TESTS = ROOT / "tests" / "targets" / "cuda" / "emulation"
EXPERTS = "test_cuda_emulated_experts.py"
MODEL = "test_cuda_emulated_model.py"
ATTENTION = "test_cuda_emulated_attention.py"
LINEAR = "test_cuda_emulated_linear.py"
SAMPLING = "test_cuda_emulated_sampling.py"
AROUND = "test_cuda_emulated_around.py"
DRAFTERS = "test_cuda_emulated_drafters.py"
COVERED = {
    "attention.cuh": (ATTENTION,),
    "attention_chunk.cuh": (ATTENTION,),
    "attention_combine.cu": (ATTENTION,),
    "attention_fused.cu": (ATTENTION,),
    "attention_prepare.cu": (ATTENTION,),
    "attention_split.cu": (ATTENTION,),
    "choice.cuh": (SAMPLING,),
    "common.cuh": (AROUND, MODEL),
    "cycle.cu": (AROUND,),
    "experts.cuh": (EXPERTS,),
    "gemm.cu": (LINEAR, MODEL),
    "gemm_reduce.cu": (AROUND,),
    "grouped.cu": (f"{EXPERTS}::test_many_rows_by_expert",),
    "hidden.cuh": (MODEL,),
    "inputs.cu": (DRAFTERS,),
    "integers.cuh": (EXPERTS,),
    "layout.cu": (DRAFTERS,),
    "linear.cuh": (LINEAR, MODEL),
    "lookup.cu": (DRAFTERS,),
    "moe.cu": (EXPERTS, MODEL),
    "narrow.cuh": (MODEL,),
    "norm.cu": (AROUND, MODEL),
    "norm.cuh": (AROUND, MODEL),
    "ordered.cu": (DRAFTERS,),
    "quantise.cu": (AROUND,),
    "rescore.cu": (AROUND,),
    "ring.cuh": (LINEAR,),
    "route.cu": (
        f"{EXPERTS}::test_a_router_chooses_the_best",
        f"{EXPERTS}::test_a_dense_branch_begins_beside_the_router",
        MODEL,
    ),
    "sample.cu": (SAMPLING,),
    "steps.cu": (DRAFTERS,),
    "tile.cuh": (LINEAR, EXPERTS),
    "untile.cu": (AROUND,),
}
"""Emulated sources, and what covers them: the quicker first."""
BY_HAND = [
    # masks and places
    ("attention_chunk.cuh", "key0 + i <= newest && key0", "key0 + i < newest && key0"),
    ("attention_chunk.cuh", "query - job.window + 1 : 0", "query - job.window : 0"),
    ("attention_combine.cu", "<= job.newest(", "< job.newest("),
    ("attention.cuh", "[b * tokens + min(query - start,", "[b * tokens + min(query - start + 1,"),
    ("attention_chunk.cuh", "start, position(job, rows - 1));", "start, position(job, 0));"),
    ("attention_combine.cu", "if (place.slot < 0) return;", ""),
    ("linear.cuh", "m + e % 2 < job.rows", "m + e % 2 <= job.rows"),
    ("linear.cuh", "if (n + e / 2 * 8 < job.n && m", "if (m"),
    ("experts.cuh", "before % TOKENS == 0", "before % TOKENS == 1"),
    ("experts.cuh", "earlier = same && j < i", "earlier = same && j <= i"),
    ("sample.cu", "turn ^= 1;\n    T* warps", "T* warps"),
    ("sample.cu", "turn ^= 1;\n    T* groups", "T* groups"),
    # rings
    (
        "gemm.cu",
        "if (++stage == job.stages) stage = 0, phase ^= 1;",
        "if (++stage == job.stages) stage = 0;",
    ),
    ("gemm.cu", "at.tiles = ring.first.tiles, at.phase ^= 1;", "at.tiles = ring.first.tiles;"),
    ("gemm.cu", "if (!kRounds || !at.phase) at.inputs", "at.inputs"),
    ("gemm.cu", "const int round = kRounds ? phase ^ 1 : 0;", "const int round = 0;"),
    ("gemm.cu", "(job.passes > 1 ? ring_bytes + job.stages * kBarriers : 0)", "(0)"),
    ("gemm.cu", "if ((step += here) == job.steps) step = 0;", "step += here;"),
    ("moe.cu", "sums + turn % 2 * room", "sums"),
    ("moe.cu", "await_asked<kRingStages - 1>()", "await_asked<kRingStages>()"),
    ("grouped.cu", "await_asked<kStages - 2>()", "await_asked<kStages - 1>()"),
    # starts
    ("gemm.cu", "if (job.pdl_trigger == kTriggerInTurn) let_next_start();", ""),
    (
        "moe.cu",
        "  if (!job.pdl_inputs_ready) wait_for_previous();\n  let_next_start();",
        "  let_next_start();\n  if (!job.pdl_inputs_ready) wait_for_previous();",
    ),
    (
        "route.cu",
        "  wait_for_previous();\n  let_next_start();",
        "  let_next_start();\n  wait_for_previous();",
    ),
    (
        "route.cu",
        "wait_for_previous(), let_next_start();",
        "let_next_start(), wait_for_previous();",
    ),
    ("norm.cuh", "if (!job.pdl_trigger_late) let_next_start();", "let_next_start();"),
    (
        "attention_split.cu",
        "  wait_for_previous();\n  let_next_start();\n#pragma unroll 1",
        "  let_next_start();\n  wait_for_previous();\n#pragma unroll 1",
    ),
]
"""File, what stands there once, and what takes its place."""
EXPLAINED: dict[str, str] = {
    "attention_fused.cu: __syncwarp(); #3": "orders nothing: only lane 0 acts between two turns",
    "experts.cuh: __syncwarp();": "the next turn's __match_any_sync gathers the warp",
    "gemm.cu: if (!job.pdl_inputs_ready) wait_for_previous();": "a stage is free once consumers, "
    "who have waited, have read it",
    "gemm.cu: __syncwarp();": "the MMAs before it gather all lanes after their loads",
    "gemm.cu: wait_for_previous();": "a head's `certified` path: the card's alone, as screen.cu is",
    "gemm.cu: __syncwarp(); #2": "pass<kStarted> below counts each lane, lane 0 too",
    "route.cu: __syncwarp();": "each lane reads what it has copied itself",
    "route.cu: wait_for_previous(), let_next_start();": "who has a tile has waited, and others "
    "act after the cluster's barrier",
    "route.cu: wait_for_previous(), let_next_start(); -> let_next_start(), wait_for_previous();": ""
    "some CTA has a tile, and has waited before it let the next kernel start",
    "gemm.cu: __syncwarp(); #3": "pass<kMade> below counts each lane, lane 0 too",
    "moe.cu: if (!kOwn) __syncwarp(); #2": "the MMAs before it gather all lanes after their loads",
    "moe.cu: __syncwarp();": "the last entry's MMAs gather all lanes after their loads",
    "moe.cu: __syncwarp(); #3": "the last entry's MMAs, and the reduction before each store",
    "moe.cu: if (j && kColumnTiles == 1) __syncwarp();": "orders nothing: it makes the compiler "
    "load again",
    "moe.cu: __syncwarp(); #5": "token 0's copies are the lane's own; the warp's maximum gathers "
    "all lanes before another's are read or written over",
    "ordered.cu: __syncthreads(); #3": "a bound too low lets more clusters through, of the same "
    "ranks: it saves time",
    "sample.cu: cluster_sync(); #3": "a cluster's CTAs start at once here; on a card one may write "
    "into another only once that has started",
    "attention_combine.cu: if (place.slot < 0) return; -> nothing": "saves time: what an idle row "
    "gets is not read",
    "gemm.cu: if (job.pdl_trigger == kTriggerInTurn) let_next_start(); -> nothing": "costs time "
    "alone: the end of a CTA lets the next kernel start too",
    "norm.cuh: if (!job.pdl_trigger_late) let_next_start(); -> let_next_start();": "timing alone: "
    "what comes from memory first",
    "attention_split.cu: wait_for_previous(); let_next_start(); #pragma unroll 1 -> "
    "let_next_start(); wait_for_previous(); #pragma unroll 1": "timing alone: `combine` reads "
    "nothing before its own wait",
    "inputs.cu: wait_for_previous();": "a call's first kernel, launched without an early start",
}
"""Why a survivor is one, by its name."""


@dataclass(frozen=True)
class Sabotage:
    name: str
    file: str
    line: int
    text: str
    """Of the whole file, sabotaged."""

    @property
    def tests(self) -> list[str]:
        return [str(TESTS / test) for test in COVERED[self.file]]


def dropped() -> Iterator[Sabotage]:
    """Each call of `CALL`; where the same line stands again, the name has its number."""
    for file in sorted(COVERED):
        text, seen = _source(file), {}
        for match in CALL.finditer(text):
            line = text[text.rfind("\n", 0, match.start()) + 1 : text.find("\n", match.end())]
            code = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
            if "//" in code or "__device__" in code:
                continue
            begin = match.end() if match[0].endswith("(") else text.index("(", match.start()) + 1
            end = emulated._closing(text, begin) + 1
            label = line.split("//")[0].strip()
            seen[label] = seen.get(label, 0) + 1
            again = f" #{seen[label]}" if seen[label] > 1 else ""
            sabotaged = text[: match.start()] + "void()" + text[end:]
            yield Sabotage(f"{file}: {label}{again}", file, _line(text, match.start()), sabotaged)


def by_hand() -> Iterator[Sabotage]:
    for file, old, new in BY_HAND:
        text = _source(file)
        assert text.count(old) == 1, (file, old, text.count(old))
        name = f"{file}: {' '.join(old.split())} -> {' '.join(new.split()) or 'nothing'}"
        yield Sabotage(name, file, _line(text, text.index(old)), text.replace(old, new))


def _source(file: str) -> str:
    return (FILES.get(Path(file).stem, SOURCES) / file).read_text()


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def outcome(sabotage: Sabotage) -> str:
    """How it was caught, or "survived"."""
    for schedule in range(SCHEDULES):
        status = _run(sabotage, schedule)
        if status == NOT_COMPILED:
            return "does not compile"
        if status:
            how = {1: "a test fails", None: "never ends"}.get(status, "a crash")
            return f"caught by schedule {schedule}: {how}"
    return "survived"


def _run(sabotage: Sabotage, schedule: int) -> int | None:
    """The exit status of pytest in a process of its own; None where it did not end. A fork: what
    tests import takes longer than most of them."""
    child = os.fork()
    if not child:
        os._exit(_run_here(sabotage, str(schedule)))
    for _ in range(SECONDS * POLLS):
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(1 / POLLS)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _run_here(sabotage: Sabotage, schedule: str) -> int:
    """Tests with the text of a file in its place."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1), os.dup2(nowhere, 2)
    emulated.REPLACED[sabotage.file] = sabotage.text
    compile_ = emulated._compile

    def compiled(*command: str) -> None:
        try:
            compile_(*command)
        except subprocess.CalledProcessError:
            os._exit(NOT_COMPILED)

    emulated._compile = compiled
    options = "-q", "-x", "-p", "no:cacheprovider", "--schedule", schedule
    return int(pytest.main([*options, *sabotage.tests]))


def run_all(words: list[str]) -> int:
    """-> the number of survivors without a reason, and of reasons without a survivor."""
    every = [*dropped(), *by_hand()]
    chosen = [s for s in every if not words or any(word in s.name for word in words)]
    wrong, caught, started = 0, 0, time.monotonic()
    with get_context("fork").Pool(JOBS) as pool:
        for sabotage, how in zip(chosen, pool.imap(outcome, chosen), strict=True):
            reason = EXPLAINED.get(sabotage.name)
            caught += how.startswith("caught")
            wrong += how.startswith("caught") == (reason is not None)
            print(
                f"{how:36} {sabotage.line:4} {sabotage.name}" + (f"  [{reason}]" if reason else ""),
                flush=True,
            )
    minutes = (time.monotonic() - started) / 60
    print(f"{caught} of {len(chosen)} caught, {len(chosen) - caught} not; {wrong} unexplained")
    print(f"{minutes:.0f} minutes, up to {SCHEDULES} schedules each")
    return wrong


if __name__ == "__main__":
    sys.exit(bool(run_all(sys.argv[1:])))
