"""Parameters as a pytree: stacked by layer group for the scan, placed by logical axes.

`Params.segments[s][j][name]` holds tensor `name` of position j of layer group s's pattern, with
a leading axis of that group's repeats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specdec.core.types import Array
from targets.arch import Arch
from targets.checkpoint import Checkpoint, Stored, dequantise, quantise_int8
from targets.jax.placing import put
from targets.layer_groups import LayerGroup, layer_groups
from targets.soundness import is_sound, refuse_unsound
from targets.tensors import TensorSpec, layer_tensors, model_tensors, stored_name


class Quantized(NamedTuple):
    """Per-output-channel weights: values [..., out, in] int8 or e4m3, scale [..., out] float32."""

    values: Array
    scale: Array


@partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["mesh", "parts"])
@dataclass(frozen=True)
class SpreadWeight:
    """A weight of which each device of the mesh holds a part: of every expert some of its width,
    of the per-layer projection some outputs. Mesh and PartitionSpecs (parts, as the weight is
    built) ride along: what is done with the part is a program of each device (feedforward.py,
    layers.py)."""

    weight: Any
    mesh: Mesh
    parts: Any


class Params(NamedTuple):
    """top: tensors outside the layers; segments: one tuple of dicts per layer group (see
    module), by the name that checkpoints of pretraining have had since 0.1.0."""

    top: dict[str, Array]
    segments: tuple[tuple[dict[str, Any], ...], ...]


SPREAD = {"expert", "per_layer"}
"""Axes of weights that are multiplied as programs of each device, not by the partitioner."""
MESH_AXES = dict.fromkeys(("vocab", "heads", "kv", "ffw", *SPREAD), "tp") | {"none": None}
"""The one table that places parameters: logical axis to mesh axis."""


def partition(spec: TensorSpec, tp: int, leading: int = 0) -> PartitionSpec:
    """Where a tensor lives on a mesh whose `tp` axis has this size; what won't divide is copied."""
    axes = []
    for axis, size in zip(spec.axes, spec.shape, strict=True):
        parts = spec.heads if axis in ("heads", "kv") else size // (1 + spec.halves)
        axes.append(MESH_AXES[axis] if parts % tp == 0 else None)
    return PartitionSpec(*([None] * leading), *axes)


def _build(arch: Arch, leaf: Callable[[list[str], TensorSpec, bool], Any]) -> Params:
    """Walk the tree once: `leaf(names, spec, stacked)` makes the tensor that holds these names."""
    top = {name: leaf([name], spec, False) for name, spec in model_tensors(arch).items()}
    stacks = []
    for group in layer_groups(arch):
        pattern = [
            {
                name: leaf(_names(group, j, name), spec, True)
                for name, spec in layer_tensors(arch, layer).items()
            }
            for j, layer in enumerate(group.pattern)
        ]
        stacks.append(tuple(pattern))
    return Params(top, tuple(stacks))


def _names(group: LayerGroup, position: int, name: str) -> list[str]:
    return [f"layers.{group.layer(g, position)}.{name}" for g in range(group.repeats)]


def load_params(
    checkpoint: Checkpoint, arch: Arch, dtype: Any, int8: bool = False, mesh: Mesh | None = None
) -> Params:
    """Read, optionally quantise the linears to int8, stack and place. dtype: of what stays wide."""

    def leaf(names: list[str], spec: TensorSpec, stacked: bool) -> Any:
        stored = _alike([_read(checkpoint, name) for name in names])
        if int8 and spec.linear and stored[0].scale is None:
            stored = [quantise_int8(s.values) for s in stored]
        return _spread(_place(stored, spec, stacked, dtype, mesh), spec, mesh)

    return _build(arch, leaf)


def _read(checkpoint: Checkpoint, name: str) -> Stored:
    """Raises UserError for weights that are no numbers: on the host, which copies them anyway."""
    stored = checkpoint.read(name)
    if not all(is_sound(part) for part in (stored.values, stored.scale) if part is not None):
        refuse_unsound(checkpoint.path, name)
    return stored


def _alike(stored: list[Stored]) -> list[Stored]:
    """Layers that are scanned together share one storage; where a file mixes quantised and wide
    layers (third-party recipes do), all of them are widened."""
    if len({(s.values.dtype, s.scale is None) for s in stored}) == 1:
        return stored
    return [Stored(dequantise(s)) for s in stored]


def _place(
    stored: list[Stored], spec: TensorSpec, stacked: bool, dtype: Any, mesh: Mesh | None
) -> Any:
    def place(parts: list[np.ndarray], spec: TensorSpec, kind: Any) -> Array:
        if spec.halves and mesh is not None:
            parts = [_halves_by_device(part, spec, mesh.shape["tp"]) for part in parts]
        values = np.stack(parts) if stacked else parts[0]
        return put(values.astype(kind), sharding_of(spec, stacked, mesh))

    values = [s.values for s in stored]
    scales = [s.scale for s in stored if s.scale is not None]
    if not scales:
        return place(values, spec, dtype)
    return Quantized(
        place(values, spec, values[0].dtype), place(scales, _scale_spec(spec), np.float32)
    )


def place(stored: Stored, spec: TensorSpec, dtype: Any, mesh: Mesh | None) -> Any:
    """One tensor on the devices: an array in `dtype`, or `Quantized` where it has a scale."""
    return _place([stored], spec, False, dtype, mesh)


def _halves_by_device(values: Any, spec: TensorSpec, tp: int) -> Any:
    """[E, 2 I, ...] in an order in which a device's part has its share of both halves."""
    if not any(partition(spec, tp)):
        return values
    each = values.reshape(len(values), 2, tp, -1, *values.shape[2:])
    return each.swapaxes(1, 2).reshape(values.shape)


def _spread(weight: Any, spec: TensorSpec, mesh: Mesh | None) -> Any:
    """The weight, marked as spread if each device holds a part of it to work on by itself."""
    if mesh is None or not SPREAD & set(spec.axes) or not any(partition(spec, mesh.shape["tp"])):
        return weight
    return SpreadWeight(weight, mesh, jax.tree.map(lambda leaf: leaf.sharding.spec, weight))


def _scale_spec(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(spec.shape[:-1], spec.axes[:-1], heads=spec.heads, halves=spec.halves)


def sharding_of(spec: TensorSpec, stacked: bool, mesh: Mesh | None) -> NamedSharding | None:
    if mesh is None:
        return None
    return NamedSharding(mesh, partition(spec, mesh.shape["tp"], int(stacked)))


def random_params(arch: Arch, seed: int, dtype: Any, int8: bool, mesh: Mesh | None) -> Params:
    """`init_params`, each device making its own part; the values don't depend on the split."""
    leaves, tree = jax.tree.flatten(abstract_params(arch, dtype, int8, mesh))

    def make(key: Array) -> list[Array]:
        return jax.tree.leaves(init_params(arch, key, dtype, int8, mesh))

    where = [leaf.sharding for leaf in leaves]
    return jax.tree.unflatten(tree, jax.jit(make, out_shardings=where)(jax.random.key(seed)))


def init_params(
    arch: Arch,
    key: Array,
    dtype: Any = jnp.float32,
    int8: bool = False,
    mesh: Mesh | None = None,
) -> Params:
    """Random parameters: linears with std 1 / sqrt(in), embeddings with 1 / sqrt(hidden), so
    that scaled embeddings have unit variance; norms, scalars and router scales are 1.
    int8: quantised linears, drawn as integers. mesh: whose devices' parts are to lie together."""
    counter = iter(range(10**6))

    def leaf(names: list[str], spec: TensorSpec, stacked: bool) -> Any:
        shape = ((len(names),) if stacked else ()) + spec.shape
        if len(spec.shape) == 1:
            return jnp.ones(shape, dtype)
        std = (arch.hidden if names[0] == "embed_tokens" else spec.shape[-1]) ** -0.5
        if names[0] == "embed_tokens_per_layer":
            std = arch.per_layer_input**-0.5
        noise = jax.random.fold_in(key, next(counter))
        if int8 and spec.linear:
            values = jax.random.randint(noise, shape, -127, 128, jnp.int8)
            # integers uniform in [-127, 127] have std 127 / sqrt(3)
            scale = jnp.full(shape[:-1], std * 3**0.5 / 127, jnp.float32)
            return Quantized(dealt(values, spec, stacked), scale)
        values = (jax.random.normal(noise, shape, jnp.float32) * std).astype(dtype)
        return dealt(values, spec, stacked)

    def dealt(values: Array, spec: TensorSpec, stacked: bool) -> Array:
        if not spec.halves or mesh is None:
            return values
        deal = partial(_halves_by_device, spec=spec, tp=mesh.shape["tp"])
        return jax.vmap(deal)(values) if stacked else deal(values)

    return _build(arch, leaf)


def abstract_params(arch: Arch, dtype: Any, int8: bool = False, mesh: Mesh | None = None) -> Params:
    """Shapes, dtypes and shardings only: for compiling without weights."""

    def leaf(names: list[str], spec: TensorSpec, stacked: bool) -> Any:
        def shape_of(spec: TensorSpec, kind: Any) -> jax.ShapeDtypeStruct:
            shape = ((len(names),) if stacked else ()) + spec.shape
            return jax.ShapeDtypeStruct(shape, kind, sharding=sharding_of(spec, stacked, mesh))

        if not (int8 and spec.linear):
            return _spread(shape_of(spec, dtype), spec, mesh)
        scale = shape_of(_scale_spec(spec), jnp.float32)
        return _spread(Quantized(shape_of(spec, jnp.int8), scale), spec, mesh)

    return _build(arch, leaf)


def to_tensors(
    params: Params, arch: Arch, prefix: str = "model.language_model."
) -> dict[str, np.ndarray]:
    """Unstack into Hugging Face names, as bfloat16 (layout of the released files)."""
    tensors: dict[str, np.ndarray] = {}

    def keep(name: str, values: Array) -> None:
        tensors[stored_name(prefix, name)] = np.asarray(values, np.float32).astype(
            ml_dtypes.bfloat16
        )

    for name, values in params.top.items():
        keep(name, values)
    for group, pattern in zip(layer_groups(arch), params.segments, strict=True):
        for j, weights in enumerate(pattern):
            for name, values in weights.items():
                for g, full_name in enumerate(_names(group, j, name)):
                    keep(full_name, values[g])
    return tensors
