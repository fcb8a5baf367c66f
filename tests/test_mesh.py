"""Tensor parallelism on forced host devices: the same model, split, gives the same text."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
from pathlib import Path
from drafters.ngram import NgramDrafter
from specdec.cycle import host_cycle
from specdec.engine import Engine
from specdec.types import Sequence
from targets.jax.load import JaxOptions, load_target
out = {}
for tp in (1, 2, 4):
    options = JaxOptions(slots=2, max_len=64, k=4, chunk=8, tp=tp, mapped=False)
    target, drafter = load_target(Path(sys.argv[1]), options), NgramDrafter(1, 3)
    engine = Engine(target, drafter, host_cycle(target, drafter, 4))
    seqs = [Sequence([5, 6, 7] * 4, max_tokens=24), Sequence([9], max_tokens=24)]
    list(engine.run(seqs))
    out[tp] = [s.tokens for s in seqs]
    gate = target.params.segments[0][0]["mlp.gate_proj"]
    assert len({s.device for s in gate.addressable_shards}) == tp
print(json.dumps(out))
"""


@pytest.mark.parametrize("variant", ["31b", "e4b", "26b-a4b"])
def test_any_split_gives_the_same_greedy_text(tiny, variant):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tiny[variant])],
        env=os.environ | flags,
        capture_output=True,
        text=True,
        check=True,
    )
    texts = json.loads(done.stdout.splitlines()[-1])
    assert texts["1"] == texts["2"] == texts["4"]
