"""Run by test_random_mesh.py on four forced host devices: random weights by split, as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from drafters.eagle3.jax.drafter import EagleDraftHead
from drafters.eagle3.spec import random_head
from drafters.model.host import CATCH_UP, ModelDrafter
from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from targets.arch import Arch, parse_arch
from targets.jax.host_drafter import HostHead
from targets.jax.load import JaxOptions, random_target
from targets.jax.params import SpreadWeight
from targets.jax.target import JaxTarget
from tests.support.eagle3_oracle import SPEC
from tests.support.tiny import VARIANTS, config_of
from tests.targets.jax.mesh_worker import LAYERS, K, split_in, texts

SPLITS = (1, 2)
CASES = {"31b": False, "26b-a4b": False, "e4b": True}
"""Variants, and whether in int8."""
KEPT = ("mlp.gate_proj", "experts.gate_up_proj", "input_layernorm")


def values(target: JaxTarget, name: str) -> list[float]:
    """A sum over each of a weight's arrays."""
    leaves = jax.tree.leaves(target.params.segments[0][0][name])
    return [float(np.abs(np.asarray(leaf, np.float64)).sum()) for leaf in leaves]


def say(variant: str, arch: Arch, int8: bool, tp: int) -> dict[str, Any]:
    options = JaxOptions(
        slots=2, max_len=64, k=K, tp=tp, mapped=False, chunk=8, narrow="int8" if int8 else None
    )
    target, none = random_target(arch, options), NoDrafter()
    first = target.params.segments[0][0]
    found = {name: split_in(jax.tree.leaves(first[name])[0]) for name in KEPT if name in first}
    said = {} if int8 else {"plain": texts(target, none, host_cycle(target, none, 0))}
    if variant == "31b" and tp > 1:
        small = random_target(arch, JaxOptions(2, 64, K, CATCH_UP, tp=tp, mapped=False), seed=1)
        drafter: Any = ModelDrafter(small)
        said["model"] = texts(target, drafter, host_cycle(target, drafter, K))
        shape = replace(SPEC, hidden=arch.hidden, vocab=arch.vocab, layers=(0, 1, 2))
        read = JaxOptions(2, 64, K, tp=tp, mapped=False, chunk=8, features=shape.layers)
        target = random_target(arch, read)
        drafter = HostHead(EagleDraftHead(random_head(shape), target, K))
        said["eagle3"] = texts(target, drafter, host_cycle(target, drafter, K))
    spread = any(isinstance(weight, SpreadWeight) for weight in first.values())
    sums = {name: values(target, name) for name in found}
    return {"texts": said, "parts": found, "spread": spread, "sums": sums}


def bench() -> None:
    """The command, on a tiny "released" model and with few samples."""
    import targets.arch
    from specdec.bench import timing
    from specdec.cli import main as command

    targets.arch.released = lambda name: parse_arch(config_of("12b"))
    timing.STEPS, timing.CYCLE_SAMPLES, timing.FIRST_TOKENS = 3, 2, 2
    options = "--tp 2 --drafter eagle3 --k 2 --widths 1 --slots 1 --contexts 20 --max-len 256"
    more = "--max-tokens 6 --repeats 1 --prompt-lengths 8 --loop host --json"
    command(["bench", "--random", "gemma-4-31b", *options.split(), *more.split()])


def main(variants: list[str]) -> None:
    for variant in variants:
        int8 = CASES[variant]
        config = VARIANTS[variant]
        shared = {"num_kv_shared_layers": 2} if "num_kv_shared_layers" in config else {}
        config |= {"layer_types": LAYERS} | shared  # what takes time is compiling
        arch = parse_arch(config_of(variant))
        for tp in SPLITS:
            line = {"variant": variant, "tp": tp, **say(variant, arch, int8, tp)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main([name for name in sys.argv[1:] if name in CASES])
    if "bench" in sys.argv:
        bench()
