"""Compile-only proof for TPU: the real TPU compiler, no TPU. Run with: pytest -m tpu (libtpu)."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from targets.arch import released
from targets.jax import programs
from targets.jax.cache import abstract_cache
from targets.jax.load import JaxOptions, make_plan
from targets.jax.params import abstract_params
from targets.jax.programs import Feed

pytestmark = pytest.mark.tpu

HBM = 32 * 2**30
"""Bytes per v6e chip."""


@pytest.fixture(scope="module")
def mesh():
    pytest.importorskip("libtpu")
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2x1")
    return Mesh(np.array(topology.devices), ("tp",))


def compiled_verify(name: str, mesh: Mesh, slots: int, max_len: int):
    arch = released(f"gemma-4-{name}")
    plan = make_plan(arch, JaxOptions(slots=slots, max_len=max_len, k=7, mapped=False))
    params = abstract_params(arch, jnp.bfloat16, int8=True, mesh=mesh)
    cache = abstract_cache(arch, slots, max_len, plan.slack, jnp.bfloat16, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    feed = Feed(
        jax.ShapeDtypeStruct((slots, plan.width), jnp.int32, sharding=everywhere),
        jax.ShapeDtypeStruct((slots,), jnp.int32, sharding=everywhere),
        jax.ShapeDtypeStruct((slots,), jnp.int32, sharding=everywhere),
    )
    verify = jax.jit(partial(programs.verify, plan), donate_argnums=1)
    return verify.lower(params, cache, feed).compile()


@pytest.mark.parametrize("name", ["31b", "e4b"])
def test_verify_compiles_and_fits(name, mesh, capsys):
    program = compiled_verify(name, mesh, slots=1, max_len=2048)
    memory = program.memory_analysis()
    used = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
    text = program.as_text()
    found = Counter(
        re.findall(
            r"= \S+ (all-reduce|all-gather|reduce-scatter|all-to-all|"
            r"collective-permute)(?:-start)?\(",
            text,
        )
    )
    with capsys.disabled():
        print(f"\n{name}, int8, tp=4, context 2048, width 8, per chip:")
        print(
            f"  arguments {memory.argument_size_in_bytes / 2**30:.2f} GiB, temporaries "
            f"{memory.temp_size_in_bytes / 2**30:.3f} GiB, in all {used / 2**30:.2f} GiB"
        )
        print(f"  collectives in the program text (one scan body = one group): {dict(found)}")
        cost = program.cost_analysis()
        print(f"  bytes accessed {cost.get('bytes accessed', 0) / 1e9:.2f} GB")
    assert used < HBM
    assert memory.alias_size_in_bytes > 0, "the cache is not donated"
