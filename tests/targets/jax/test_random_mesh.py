"""Random weights of a split model are made where they lie, and are those of one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache

import pytest

from tests.support import cheap
from tests.targets.jax.random_mesh_worker import CASES, SPLITS

FLAGS = f"--xla_force_host_platform_device_count=4 {cheap.FLAGS}"


@cache
def worker(*asked: str) -> list[str]:
    """Its lines."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.targets.jax.random_mesh_worker", *asked],
        env=os.environ | {"XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


DEFAULT = ("26b-a4b", "bench")
"""Both of one process, for jax starts but once."""
EACH = [pytest.param(v, marks=() if v == "26b-a4b" else pytest.mark.slow) for v in CASES]


@pytest.mark.parametrize("variant", EACH)
def test_the_weights_are_split_and_those_of_one_device(variant) -> None:
    asked = DEFAULT if variant in DEFAULT else (variant,)
    said = (json.loads(line) for line in worker(*asked) if line.startswith('{"variant"'))
    lines = {(line["variant"], line["tp"]): line for line in said}
    whole = lines[variant, 1]
    for tp in SPLITS[1:]:
        found = lines[variant, tp]
        assert found["parts"]["mlp.gate_proj"] == tp and found["parts"]["input_layernorm"] == 1
        if variant == "26b-a4b":
            assert found["parts"]["experts.gate_up_proj"] == tp and found["spread"]
        for name, sums in whole["sums"].items():
            assert found["sums"][name] == pytest.approx(sums, rel=1e-6), (name, tp)
        for way, tokens in found["texts"].items():
            assert tokens == whole["texts"]["plain"], (way, tp)


def test_bench_takes_random_weights_of_a_split_model() -> None:
    document = json.loads(worker(*DEFAULT)[-1])
    assert document["equal"] and document["config"]["model"]["tp"] == 2
    assert {run["name"].split(",")[0] for run in document["runs"]} == {"none", "eagle3"}
