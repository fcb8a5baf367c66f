"""What a JAX target needs of a device's memory, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from specdec.core.errors import UserError
from targets.arch import Arch, released
from targets.checkpoint import Checkpoint
from targets.jax.cache import abstract_cache
from targets.jax.load import CHUNK, JaxOptions, kv_dtype_of, make_mesh, make_plan, wide_dtype
from targets.jax.params import bytes_of
from targets.jax.tower import CELLS_AT_ONCE
from targets.memory import Need, gib, host_free
from targets.published import SIZES
from targets.tensors import all_tensors
from targets.vision import memory as vision_memory

STORED = {"F8_E4M3": 1.0, "I8": 1.0, "I32": 0.5625, "U8": 0.5625}
"""Bytes per value of quantised linear layers, scales included, by safetensors' dtype."""
ROUNDED = {"int8": 1.0, "int4": 0.5625}
"""The same, where they are rounded while loading."""
COPIES = 3
"""float32 arrays [rows, vocab], and [chunk, widest], at once."""
RUNTIME = 512 << 20
"""Bytes of compiled programs and of the runtime."""


def need(arch: Arch, options: JaxOptions, checkpoint: Checkpoint | None) -> Callable[[int], Need]:
    """By context, on one device. checkpoint: None for random weights. Raises UserError for a mesh
    that there is no room for."""
    mesh = make_mesh(options.tp)
    weights = _weight_bytes(arch, options, checkpoint) // options.tp

    def at(context: int) -> Need:
        return Need(weights, _cache_bytes(arch, options, context, mesh), _workspace(arch, options))

    return at


def _weight_bytes(arch: Arch, options: JaxOptions, checkpoint: Checkpoint | None) -> int:
    wide, total = jnp.dtype(wide_dtype(options)).itemsize, 0.0
    for name, spec in all_tensors(arch).items():
        each: float = wide
        if spec.linear:
            stored = None if checkpoint is None else STORED.get(checkpoint.stored_as(name))
            rounded = None if options.narrow is None else ROUNDED[options.narrow]
            each = stored or rounded or wide
        total += prod(spec.shape) * each
    seen = vision_memory.weight_bytes(options.vision, arch.hidden, wide)
    return int(total) + seen * options.tp  # whole on each device


def _cache_bytes(arch: Arch, options: JaxOptions, context: int, mesh: Mesh | None) -> int:
    """Keys and values of each layer as one device holds them."""
    plan = make_plan(arch, replace(options, max_len=context))
    kind = kv_dtype_of(options) or wide_dtype(options)
    cache = abstract_cache(arch, plan.slots, plan.max_len, plan.slack, kind, mesh)
    return sum(bytes_of(leaf.dtype, prod(_held(leaf))) for leaf in jax.tree.leaves(cache.layers))


def _held(leaf: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """The shape of a device's part."""
    return leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)


def _workspace(arch: Arch, options: JaxOptions) -> int:
    plan = make_plan(arch, replace(options, max_len=min(options.chunk or CHUNK, arch.max_position)))
    widest = max(layer.ffw for layer in arch.layers)
    logits = plan.slots * plan.width * arch.vocab
    wide = jnp.dtype(wide_dtype(options)).itemsize
    scores = 0 if options.vision is None else CELLS_AT_ONCE * options.vision.patches.pool**2
    pictures = vision_memory.workspace_bytes(options.vision, wide, scores)
    return RUNTIME + 4 * COPIES * (logits + plan.widest * widest) + pictures


def free_bytes() -> int | None:
    """Of the device that has the least; None where it is not reported."""
    if jax.default_backend() == "cpu":
        return host_free()
    stats = [device.memory_stats() for device in jax.local_devices()]
    if not all(stats):
        return None
    return min(s["bytes_limit"] - s["bytes_in_use"] for s in stats if s)


def check_fits(arch: Arch, needed: Need, free: int | None, rounded: Callable[[], Need]) -> None:
    """Raise UserError, with what would fit, if `free` bytes are not enough. rounded: the need with
    linear layers of 4 bits."""
    if free is None or needed.total <= free:
        return
    raise UserError(
        f"this needs {needed} but {gib(free)} are free: {_remedy(arch, needed, free, rounded())}"
    )


def _remedy(arch: Arch, needed: Need, free: int, rounded: Need) -> str:
    offers = []
    if needed.weights + needed.workspace < free:
        offers.append("a smaller --max-len or --slots")
    if rounded.total <= free:
        offers.append("--dtype int4")
    share = needed.weights / _parameters(arch)
    smaller = {name: released(name) for name in SIZES}
    fitting = [
        name
        for name, other in smaller.items()
        if other != arch and _parameters(other) * share + needed.workspace < free
    ]
    if fitting:
        offers.append(f"a smaller model ({', '.join(fitting)})")
    return f"choose {' or '.join(offers)}" if offers else "free memory, or take a larger machine"


def _parameters(arch: Arch) -> int:
    return sum(prod(spec.shape) for spec in all_tensors(arch).values())
