"""Parameters without a checkpoint: drawn at random, or shapes alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from specdec.core.types import Array
from targets.arch import Arch
from targets.jax.int4 import GROUP
from targets.jax.params import (
    Grouped,
    Narrow,
    Params,
    Quantized,
    build,
    groups_spec,
    halves_by_device,
    scale_spec,
    sharding_of,
    spread,
)
from targets.tensors import TensorSpec


def random_params(
    arch: Arch, seed: int, dtype: Any, narrow: Narrow | None, mesh: Mesh | None
) -> Params:
    """`init_params`, each device making its own part; the values don't depend on the split."""
    leaves, tree = jax.tree.flatten(abstract_params(arch, dtype, narrow, mesh))

    def make(key: Array) -> list[Array]:
        return jax.tree.leaves(init_params(arch, key, dtype, narrow, mesh))

    where = [leaf.sharding for leaf in leaves]
    return jax.tree.unflatten(tree, jax.jit(make, out_shardings=where)(jax.random.key(seed)))


def init_params(
    arch: Arch,
    key: Array,
    dtype: Any = jnp.float32,
    narrow: Narrow | None = None,
    mesh: Mesh | None = None,
) -> Params:
    """Random parameters: linears with std 1 / sqrt(in), embeddings with 1 / sqrt(hidden), so
    that scaled embeddings have unit variance; norms, scalars and router scales are 1.
    narrow: linears drawn as integers. mesh: gate's and up's rows are ordered so that the part of
    each device is contiguous."""
    counter = iter(range(10**6))

    def leaf(names: list[str], spec: TensorSpec, stacked: bool) -> Any:
        shape = ((len(names),) if stacked else ()) + spec.shape
        if len(spec.shape) == 1:
            return jnp.ones(shape, dtype)
        std = spec.shape[-1] ** -0.5
        if names[0] == "embed_tokens_per_layer":
            std = arch.per_layer_input**-0.5
        noise = jax.random.fold_in(key, next(counter))
        if narrow is not None and spec.linear:
            most = {"int8": 127, "int4": 7}[narrow]
            values = jax.random.randint(noise, shape, -most, most + 1, jnp.int8)
            # integers uniform in [-n, n] have std sqrt(n (n + 1) / 3)
            step = std * (3 / (most * (most + 1))) ** 0.5
            if narrow == "int8":
                scale = jnp.full(shape[:-1], step, jnp.float32)
                return Quantized(dealt(values, spec, stacked), scale)
            short = [(0, 0)] * (len(shape) - 1) + [(0, -shape[-1] % GROUP)]
            values = jnp.pad(dealt(values, spec, stacked), short).astype(jnp.int4)
            values = values.reshape(*shape[:-1], -1, GROUP)
            return Grouped(values, jnp.full(values.shape[:-1], step, jnp.bfloat16), None, None)
        values = (jax.random.normal(noise, shape, jnp.float32) * std).astype(dtype)
        return dealt(values, spec, stacked)

    def dealt(values: Array, spec: TensorSpec, stacked: bool) -> Array:
        if not spec.halves or mesh is None:
            return values
        deal = partial(halves_by_device, spec=spec, tp=mesh.shape["tp"])
        return jax.vmap(deal)(values) if stacked else deal(values)

    return build(arch, leaf)


def abstract_params(
    arch: Arch, dtype: Any, narrow: Narrow | None = None, mesh: Mesh | None = None
) -> Params:
    """Shapes, dtypes and shardings only: for compiling without weights."""

    def leaf(names: list[str], spec: TensorSpec, stacked: bool) -> Any:
        def shape_of(spec: TensorSpec, kind: Any) -> jax.ShapeDtypeStruct:
            shape = ((len(names),) if stacked else ()) + spec.shape
            return jax.ShapeDtypeStruct(shape, kind, sharding=sharding_of(spec, stacked, mesh))

        if narrow is None or not spec.linear:
            return spread(shape_of(spec, dtype), spec, mesh)
        if narrow == "int4":
            by_group = groups_spec(spec, -(-spec.shape[-1] // GROUP), GROUP, mesh)
            scales = shape_of(scale_spec(by_group), jnp.bfloat16)
            return spread(Grouped(shape_of(by_group, jnp.int4), scales, None, None), spec, mesh)
        scale = shape_of(scale_spec(spec), jnp.float32)
        return spread(Quantized(shape_of(spec, jnp.int8), scale), spec, mesh)

    return build(arch, leaf)
