"""Host values on a mesh and back, where the mesh may span processes.

Every process has the same values and places the shards of its own devices, without communication.
What the host reads each step is replicated, so that each process can read it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specdec.core.types import Array


def replicated(mesh: Mesh | None) -> NamedSharding | None:
    """The whole array on each device; None without a mesh."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())


def by_vocabulary(mesh: Mesh | None, axes: int, vocab: int) -> NamedSharding | None:
    """[..., V] split as the head is: where it divides, else the whole array on each device."""
    if mesh is None or vocab % mesh.shape["tp"]:
        return replicated(mesh)
    return NamedSharding(mesh, PartitionSpec(*[None] * (axes - 1), "tp"))


def put(values: np.ndarray, sharding: NamedSharding | None) -> Array:
    """Place values that every process has. The numpy array must not be changed afterwards."""
    if sharding is None:
        return jax.device_put(values)
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def zeros(shape: Seqs[int], dtype: Any, sharding: NamedSharding | None) -> Array:
    return jnp.zeros(shape, dtype, device=sharding)


def read(array: Array) -> np.ndarray:
    """The whole array, in each process: a collective where no process holds all of it."""
    if not array.is_fully_addressable and not array.is_fully_replicated:
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)
