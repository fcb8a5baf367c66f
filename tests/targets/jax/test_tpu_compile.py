"""Compile-only proof for TPU: the real TPU compiler, no TPU. Run with: pytest -m tpu (libtpu).

Every bar of a v6e-4 that holds; docs/results/tpu-aot/ has the figures and those that don't.
"""

from __future__ import annotations

import pytest

from targets.arch import released
from targets.jax.aot import topology_mesh
from targets.jax.estimate import chip_of
from targets.jax.load import JaxOptions, make_plan
from targets.jax.report import Job, report

pytestmark = pytest.mark.tpu
TOPOLOGY = "v6e:2x2x1"


@pytest.fixture(scope="module")
def mesh():
    pytest.importorskip("libtpu")
    return topology_mesh(TOPOLOGY, 4)


def rows(name: str, mesh, batch: int, context: int, narrow="int8"):
    """Plain and verify."""
    arch = released(f"gemma-4-{name}")
    plan = make_plan(arch, JaxOptions(slots=batch, max_len=context, k=7, mapped=False))
    return report(Job(plan, mesh, chip_of(TOPOLOGY), narrow=narrow), (context,))


def collectives(row):
    """Per layer; 0 of a kind that only stands outside of them."""
    counts = {}
    for one in row["collectives"]:
        counts[one["kind"]] = counts.get(one["kind"], 0) + one["per_layer"]
    return counts


def gathers(row):
    """Bytes and runs."""
    found = row["collectives"]
    return [(one["bytes"], one["runs"]) for one in found if one["kind"] == "all-gather"]


@pytest.mark.parametrize(("context", "bar"), [(512, 1.02), (131072, 1.02)])
def test_31b_moves_what_it_must_read(mesh, context, bar):
    plain, verify = rows("31b", mesh, 1, context)
    assert plain["bytes"] == verify["bytes"]  # one program
    assert plain["bytes_over_needed"] <= bar
    assert plain["read"]["weights"] == pytest.approx(plain["memory"]["weights"], rel=1e-3)
    assert collectives(plain) == {"all-reduce": 2}
    assert plain["memory"]["fits"]
    assert plain["estimate"]["step"] <= 8e-3
    assert plain["read"]["temporaries"] + plain["written"] < 1e-3 * plain["bytes"]


def test_int4_is_read_as_it_is_stored(mesh):
    """No copy of what it stands for: the dot multiplies by the groups' scales as it reads."""
    plain, _ = rows("31b", mesh, 1, 512, "int4")
    assert plain["bytes_over_needed"] <= 1.02
    assert plain["memory"]["weights"] < 5e9
    assert plain["read"]["temporaries"] + plain["written"] < 1e-3 * plain["bytes"]


def test_a_large_batch_is_not_copied(mesh):
    plain, _ = rows("31b", mesh, 64, 512)
    assert plain["memory"]["fits"]
    assert plain["read"]["temporaries"] + plain["written"] < 0.03 * plain["bytes"]


def test_shared_caches_stay_where_they_are(mesh):
    """And of the projection that is split by outputs, what it makes is gathered, once a step."""
    plain, verify = rows("e4b", mesh, 1, 512)
    arch = released("gemma-4-e4b")
    made = 8 * len(arch.layers) * arch.per_layer_input * 2  # rows of the width, bf16
    assert gathers(plain) == [(made, 1)]
    assert collectives(plain) == {"all-reduce": 2, "all-gather": 0}
    assert verify["bytes_over_needed"] <= plain["bytes_over_needed"] <= 1.10


def test_experts_stay_where_they_are(mesh):
    plain, verify = rows("26b-a4b", mesh, 1, 512)
    assert collectives(plain) == {"all-reduce": 2}
    assert plain["bytes_over_needed"] <= 1.05
    assert verify["bytes_over_needed"] <= 1.05
