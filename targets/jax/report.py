"""The figures of `specdec compile-report` for one program: memory, traffic, floor, time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence as Seqs
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from targets.arch import Arch, MoeSpec
from targets.jax.aot import compile_verify, shapes
from targets.jax.estimate import Chip, estimate
from targets.jax.feedforward import experts_a_round
from targets.jax.hlo import Module, parse
from targets.jax.kv_exchange import BLOCK, FILLED
from targets.jax.params import Narrow, Params
from targets.jax.programs import Plan
from targets.jax.roofline import cache_bytes, weight_bytes
from targets.jax.traffic import MEANT, Collective, traffic

DRAWS = 400
"""Routings that the rounds over experts are averaged over."""
ENOUGH = 256
"""Rows by which every expert is picked."""


@dataclass(frozen=True)
class Job:
    """What to compile, and for which chips. kv_dtype: of keys and values; narrow: linear layers."""

    plan: Plan
    mesh: Mesh
    chip: Chip
    narrow: Narrow | None = None
    kv_dtype: Any = jnp.bfloat16

    @property
    def devices(self) -> int:
        return self.mesh.shape["tp"]


def report(job: Job, contexts: Seqs[int]) -> list[dict[str, Any]]:
    """Compile, and count for rows that have so many tokens: for each context a row of the table
    for plain decoding and one for a verify of all tokens of the width. It is one program; only
    what rows pick of experts differs. Bytes and operations are per chip and step, seconds are
    estimates. Raises DoesNotFit."""
    plan = job.plan
    arguments = shapes(plan, jnp.bfloat16, job.kv_dtype, job.narrow, job.mesh)
    started = time.perf_counter()
    program = compile_verify(plan, arguments, job.chip.memory)
    seconds = time.perf_counter() - started
    module = parse(program.as_text())
    common = {
        "batch": plan.slots,
        "max_len": plan.max_len,
        "width": plan.width,
        "compile_seconds": seconds,
        "memory": memory(module, program.memory_analysis(), job.chip),
    }
    compiler = costs(program)
    rows = []
    for filled in contexts:
        for kind, tokens in (("plain", 1), ("verify", plan.width)):
            counted = count(job, module, arguments[0], filled, plan.slots * tokens)
            counted["compiler"] |= compiler
            rows.append(common | {"context": filled, "kind": kind} | counted)
    return rows


def count(job: Job, module: Module, params: Params, filled: int, tokens: int) -> dict[str, Any]:
    """What a step of so many tokens in all moves and computes, beside what it must read."""
    arch, devices = job.plan.arch, job.devices
    found = traffic(module, partial(trips, arch, filled, tokens))
    floor = {
        "weights": weight_bytes(params, arch, tokens) / devices,
        "kv": cache_bytes(arch, job.kv_dtype, job.plan.slots, filled) / devices,
    }
    time_ = estimate(found, job.chip, devices)
    needed = sum(floor.values())
    return {
        "read": by_kind(found.reads),
        "written": found.written,
        "bytes": found.bytes,
        "needed": floor,
        "bytes_over_needed": found.bytes / needed,
        "flops": found.flops,
        "collectives": summary(found.collectives, len(arch.layers)),
        "estimate": asdict(time_) | {"step": time_.step},
        "floor_seconds": needed / job.chip.bandwidth,
        "share_of_floor": needed / job.chip.bandwidth / time_.step,
        "compiler": {"cycles": found.cycles},
    }


def trips(arch: Arch, filled: int, rows: int, loop: str) -> float:
    """The trip count of a loop for which it depends on data, by its JAX path: attention's loop over
    blocks of the cache, or the routed experts'."""
    if FILLED in loop:
        return -(-filled // BLOCK)
    return rounds(arch, rows)


def memory(module: Module, stats: Any, chip: Chip) -> dict[str, Any]:
    """Bytes on one chip by kind, padding included, and whether they fit."""
    kinds = by_kind({p.op_name: p.shapes[0].bytes for p in module.entry.parameters})
    kinds.pop(MEANT)
    fresh = stats.output_size_in_bytes - stats.alias_size_in_bytes
    kinds |= {
        "temporaries": stats.temp_size_in_bytes,
        "results": fresh,
        "code": stats.generated_code_size_in_bytes,
    }
    total = sum(kinds.values())
    return kinds | {"total": total, "fits": total <= chip.memory}


def by_kind(sizes: Mapping[str, float]) -> dict[str, float]:
    """Bytes by argument name to bytes of weights, K/V and the rest."""
    kinds: dict[str, float] = {"weights": 0, "kv": 0, "other": 0, MEANT: 0}
    for name, size in sizes.items():
        if name == MEANT:
            kinds[MEANT] += size
        elif name.startswith("params"):
            kinds["weights"] += size
        else:
            kinds["kv" if name.startswith("cache.layers") else "other"] += size
    return kinds


def summary(collectives: list[Collective], layers: int) -> list[dict[str, Any]]:
    """Collectives alike, with how often they run in a step and, of those in layers, per layer."""
    runs: defaultdict[tuple[str, int, bool], float] = defaultdict(float)
    for one in collectives:
        runs[one.kind, one.bytes, "/while/body/" in one.op_name] += one.runs
    return [
        {"kind": kind, "bytes": size, "runs": count, "per_layer": inside and count / layers}
        for (kind, size, inside), count in sorted(runs.items())
    ]


def costs(program: Any) -> dict[str, float]:
    """The results of XLA's own analysis, for comparison; see targets/jax/traffic.py."""
    analysis = program.cost_analysis() or {}
    return {name: analysis.get(name, 0.0) for name in ("bytes accessed", "flops")}


def rounds(arch: Arch, rows: int) -> float:
    """Rounds of the loop over a layer's routed experts, when rows pick evenly and independently:
    the mean of many draws."""
    assert arch.moe is not None
    return _rounds(arch.moe, min(rows, ENOUGH))


@cache
def _rounds(moe: MoeSpec, rows: int) -> float:
    random, found = np.random.default_rng(0), []
    for _ in range(DRAWS):
        picks = random.random((rows, moe.experts)).argsort(1)[:, : moe.top_k]
        found.append(-(-len(np.unique(picks)) // experts_a_round(moe.experts)))
    return float(np.mean(found))
