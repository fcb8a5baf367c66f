"""Compiling the verify program for TPUs that are not there: libtpu's compiler needs none."""

from __future__ import annotations

import math
import os
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specdec.core.errors import UserError
from targets.jax import programs
from targets.jax.blank_params import abstract_params
from targets.jax.cache import Cache, abstract_cache
from targets.jax.params import Narrow, Params, bytes_of
from targets.jax.placing import replicated
from targets.jax.programs import Feed, Plan

_ALONE = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
"""Environment for libtpu when it only compiles: no lock on a chip, no queries to the cloud."""


def topology_mesh(name: str, tp: int) -> Mesh:
    """The first `tp` chips of a topology such as `v6e:2x2x1` on axis `tp`. Raises UserError."""
    for key, value in _ALONE.items():
        os.environ.setdefault(key, value)
    if find_spec("libtpu") is None:
        raise UserError("compiling for a TPU needs its compiler: pip install libtpu")
    from jax.experimental import topologies

    try:
        chips = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    except (jax.errors.JaxRuntimeError, ValueError) as problem:
        message = str(problem).splitlines()[0]
        raise UserError(f"--topology {name}: {message}; v6e:2x2x1 has 4 chips") from None
    if not 1 <= tp <= len(chips):
        raise UserError(f"--tp must be 1 to {len(chips)} on {name}, got {tp}")
    return Mesh(np.array(chips[:tp]), ("tp",))


def shapes(
    plan: Plan, dtype: Any, kv_dtype: Any, narrow: Narrow | None, mesh: Mesh
) -> tuple[Params, Cache, Feed]:
    """The verify program's arguments as placed shapes."""
    params = abstract_params(plan.arch, dtype, narrow, mesh)
    cache = abstract_cache(plan.arch, plan.slots, plan.max_len, plan.slack, kv_dtype, mesh)
    whole = replicated(mesh)
    row = jax.ShapeDtypeStruct((plan.slots,), jnp.int32, sharding=whole)
    tokens = jax.ShapeDtypeStruct((plan.slots, plan.width), jnp.int32, sharding=whole)
    return params, cache, Feed(tokens, row, row)


class DoesNotFit(Exception):
    """A program that needs more memory than a chip has."""


def compile_verify(plan: Plan, arguments: tuple[Params, Cache, Feed], memory: int) -> Any:
    """The program that `JaxTarget.verify` runs, compiled for chips of `memory` bytes. Raises
    DoesNotFit."""
    held = sum(_on_one_chip(leaf) for leaf in jax.tree.leaves(arguments))
    if held > memory:
        raise DoesNotFit(f"weights and K/V alone take {held / 1e9:.1f} GB of a chip")
    verify = jax.jit(partial(programs.verify, plan), donate_argnums=1)
    try:
        return verify.lower(*arguments).compile()
    except jax.errors.JaxRuntimeError as problem:
        if "RESOURCE_EXHAUSTED" not in str(problem):
            raise
        raise DoesNotFit(str(problem).splitlines()[0]) from None


def _on_one_chip(leaf: jax.ShapeDtypeStruct) -> int:
    assert leaf.sharding is not None
    return bytes_of(leaf.dtype, math.prod(leaf.sharding.shard_shape(leaf.shape)))
