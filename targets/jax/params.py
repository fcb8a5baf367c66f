"""Parameters as a pytree: stacked by layer group for the scan, placed by logical axes.

`Params.segments[s][j][name]` holds tensor `name` of position j of layer group s's pattern, with
a leading axis of that group's repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specdec.core.errors import UserError
from specdec.core.types import Array
from targets.arch import Arch
from targets.checkpoint import Checkpoint
from targets.jax.int4 import quantise_int4
from targets.jax.placing import put
from targets.layer_groups import LayerGroup, layer_groups
from targets.soundness import is_sound, refuse_unsound
from targets.stored import Stored, dequantise, quantise_int8, unpacked
from targets.tensors import TensorSpec, layer_tensors, model_tensors, stored_name


class Quantized(NamedTuple):
    """Per-output-channel weights: values [..., out, in] int8, e4m3 or int4, scale [..., out]
    float32."""

    values: Array
    scale: Array


class Grouped(NamedTuple):
    """Weights with a scale for each group of inputs: values [..., out, groups, size] int4, e2m1 or
    e4m3, zeros behind the last input; groups [..., out, groups] as the file has them, zero
    [..., out, groups] int8 or None, scale [..., out] float32 (of NVFP4) or None. See
    `targets/stored.py`.

    Groups are an axis so that XLA multiplies by their scales where the dot reads its operand: with
    [..., out, in] a TPU's compiler writes the products to memory first."""

    values: Array
    groups: Array
    zero: Array | None
    scale: Array | None


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


@partial(jax.tree_util.register_dataclass, data_fields=["repeats"], meta_fields=[])
@dataclass(frozen=True)
class Apart:
    """A weight of a layer group, each repeat's an array of its own."""

    repeats: tuple[Any, ...]


APART_BYTES = 128 << 10
"""Bytes per layer from which a weight's layers are kept in arrays of their own."""
APART_LAYERS = 16
"""Most layers of a model for which that is done: a program of all layers, none of them in a loop,
takes long to compile, and weights may be there twice while they are cut."""


def apart(params: Params, arch: Arch) -> Params:
    """For CPUs: the large weights of few layers, which `model.forward` then runs one by one. What a
    scan cuts out of a stack XLA copies there, and that takes as long as multiplying it."""
    if len(arch.layers) > APART_LAYERS:
        return params
    every = tuple(
        tuple({name: _apart(name, weight) for name, weight in layer.items()} for layer in pattern)
        for pattern in params.segments
    )
    return params._replace(segments=every)


def _apart(name: str, weight: Any) -> Any:
    if isinstance(weight, Apart) or name.startswith("experts."):
        return weight
    leaves = jax.tree.leaves(weight)
    repeats = len(leaves[0])
    if sum(bytes_of(x.dtype, x.size) for x in leaves) < repeats * APART_BYTES:
        return weight
    return Apart(tuple(of_repeat(weight, repeat) for repeat in range(repeats)))


def of_repeat(weight: Any, repeat: int) -> Any:
    """One repeat's of a layer group's weight."""
    if isinstance(weight, Apart):
        return weight.repeats[repeat]
    return jax.tree.map(lambda leaf: leaf[repeat], weight)


def bytes_of(dtype: Any, values: int) -> int:
    """What so many values take on a device: two of 4 bits share a byte."""
    narrow = jnp.dtype(dtype) in (jnp.int4, jnp.float4_e2m1fn)
    return -(-values // 2) if narrow else values * jnp.dtype(dtype).itemsize


class Params(NamedTuple):
    """top: tensors outside the layers; segments: one tuple of dicts per layer group (see
    module), by the name that checkpoints of pretraining have had since 0.1.0."""

    top: dict[str, Array]
    segments: tuple[tuple[dict[str, Any], ...], ...]


Narrow = Literal["int8", "int4"]
"""What linears may be rounded to on load: int8 per output channel, int4 by groups of 32 inputs."""
QUANTISE: dict[Narrow, Callable[[np.ndarray], Stored]] = {
    "int8": quantise_int8,
    "int4": quantise_int4,
}
SPREAD = {"expert", "per_layer"}
"""Axes of weights that are multiplied as programs of each device, not by the partitioner."""
MESH_AXES = dict.fromkeys(("vocab", "heads", "kv", "ffw", *SPREAD), "tp") | {"none": None}
"""The one table that places parameters: logical axis to mesh axis."""


def partition(spec: TensorSpec, tp: int, leading: int = 0) -> PartitionSpec:
    """A tensor's sharding on a mesh with a `tp` axis of this size; axes that don't divide are
    copied."""
    axes = []
    for axis, size in zip(spec.axes, spec.shape, strict=True):
        parts = spec.heads if axis in ("heads", "kv") else size // (1 + spec.halves)
        axes.append(MESH_AXES[axis] if parts % tp == 0 else None)
    return PartitionSpec(*([None] * leading), *axes)


def build(arch: Arch, leaf: Callable[[list[str], TensorSpec, bool], Any]) -> Params:
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
    checkpoint: Checkpoint,
    arch: Arch,
    dtype: Any,
    narrow: Narrow | None = None,
    mesh: Mesh | None = None,
) -> Params:
    """Read, optionally round the wide linears to `narrow`, stack and place. dtype: of what stays
    wide. Raises UserError."""

    def leaf(names: list[str], spec: TensorSpec, stacked: bool) -> Any:
        stored = _alike([_read(checkpoint, name) for name in names])
        if narrow is not None and spec.linear and stored[0].wide:
            stored = [QUANTISE[narrow](s.values) for s in stored]
        elif not stored[0].wide and not spec.linear:
            stored = [Stored(dequantise(s)) for s in stored]
        return spread(_place(stored, spec, stacked, dtype, mesh), spec, mesh)

    return build(arch, leaf)


def _read(checkpoint: Checkpoint, name: str) -> Stored:
    """Raises UserError for weights that are no numbers: on the host, which copies them anyway."""
    stored = checkpoint.read(name)
    parts = (stored.values, stored.scale, stored.groups and stored.groups.scale)
    if not all(is_sound(part) for part in parts if part is not None):
        refuse_unsound(checkpoint.path, name)
    return stored


def _alike(stored: list[Stored]) -> list[Stored]:
    """Layers that are scanned together share one storage; where a file mixes them (third-party
    recipes do), all of them are widened."""
    if len({s.form for s in stored if not s.wide}) <= 1 and len({s.wide for s in stored}) == 1:
        return stored
    return [Stored(dequantise(s)) for s in stored]


def _place(
    stored: list[Stored], spec: TensorSpec, stacked: bool, dtype: Any, mesh: Mesh | None
) -> Any:
    def place(parts: Sequence[np.ndarray], spec: TensorSpec, kind: Any) -> Array:
        if spec.halves and mesh is not None:
            parts = [halves_by_device(part, spec, mesh.shape["tp"]) for part in parts]
        values = np.stack(parts) if stacked else parts[0]
        return put(values.astype(kind), sharding_of(spec, stacked, mesh))

    if stored[0].wide:
        return place([s.values for s in stored], spec, dtype)
    scales = [s.scale for s in stored if s.scale is not None]
    scale = place(scales, scale_spec(spec), np.float32) if scales else None
    groups = [s.groups for s in stored if s.groups is not None]
    values = [unpacked(s) for s in stored]
    if not groups:
        assert scale is not None
        return Quantized(place(values, spec, values[0].dtype), scale)
    size, count = groups[0].size, groups[0].scale.shape[-1]
    by_group = groups_spec(spec, count, size, mesh)
    of_groups = scale_spec(by_group)
    zeros = [g.zero for g in groups if g.zero is not None]
    return Grouped(
        place([_by_group(v, size) for v in values], by_group, values[0].dtype),
        place([g.scale for g in groups], of_groups, groups[0].scale.dtype),
        place(zeros, of_groups, np.int8) if zeros else None,
        scale,
    )


def _by_group(values: np.ndarray, size: int) -> np.ndarray:
    """[..., in] -> [..., groups, size]."""
    short = -values.shape[-1] % size
    if short:
        zeros = np.zeros((*values.shape[:-1], short), values.dtype)
        values = np.concatenate([values, zeros], -1)
    return values.reshape(*values.shape[:-1], -1, size)


def place(stored: Stored, spec: TensorSpec, dtype: Any, mesh: Mesh | None) -> Any:
    """One tensor on the devices: an array in `dtype`, or `Quantized` where it has a scale."""
    return _place([stored], spec, False, dtype, mesh)


def halves_by_device(values: Any, spec: TensorSpec, tp: int) -> Any:
    """[E, 2 I, ...] in an order in which a device's part has its share of both halves."""
    if not any(partition(spec, tp)):
        return values
    each = values.reshape(len(values), 2, tp, -1, *values.shape[2:])
    return each.swapaxes(1, 2).reshape(values.shape)


def spread(weight: Any, spec: TensorSpec, mesh: Mesh | None) -> Any:
    """The weight, marked as spread if each device holds a part of it to work on by itself."""
    if mesh is None or not SPREAD & set(spec.axes) or not any(partition(spec, mesh.shape["tp"])):
        return weight
    return SpreadWeight(weight, mesh, jax.tree.map(lambda leaf: leaf.sharding.spec, weight))


def scale_spec(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(spec.shape[:-1], spec.axes[:-1], heads=spec.heads, halves=spec.halves)


def groups_spec(spec: TensorSpec, groups: int, size: int, mesh: Mesh | None) -> TensorSpec:
    """The spec of values [..., out, groups, size]: groups are split over devices as the inputs
    would be. If that would cut within a group, groups are copied; raises UserError for weights of
    which each device multiplies its own part."""
    tp = 1 if mesh is None else mesh.shape["tp"]
    axes, cut = spec.axes, partition(spec, tp)[-1] is not None and groups % tp > 0
    if cut and SPREAD & set(axes):
        raise UserError(f"--tp {tp} cuts experts within a group of inputs that share a scale")
    inputs = "none" if cut else axes[-1]
    return replace(spec, shape=(*spec.shape[:-1], groups, size), axes=(*axes[:-1], inputs, "none"))


def sharding_of(spec: TensorSpec, stacked: bool, mesh: Mesh | None) -> NamedSharding | None:
    if mesh is None:
        return None
    return NamedSharding(mesh, partition(spec, mesh.shape["tp"], int(stacked)))


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
