"""From a checkpoint folder, or from nothing but an architecture, to a JaxTarget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec.core.errors import UserError
from specdec.core.types import MAX_DRAFT
from targets.arch import Arch
from targets.checkpoint import Checkpoint
from targets.jax.blank_params import random_params
from targets.jax.params import Narrow, load_params
from targets.jax.programs import Plan
from targets.jax.target import JaxTarget
from targets.jax.tower import PictureEncoder, load_vision
from targets.model_folder import read_arch
from targets.vision.files import VisionFiles
from targets.vision.spec import VisionSpec

WIDTHS = (8, 16, 32)
"""Compiled verify widths: the smallest that holds K + 1. Plain decoding runs at the same one."""
SHORTEST = 16
"""Least context: shorter ones can't even be checked."""
CHUNK = 128
"""Tokens per prefill call; rings of sliding layers are this much longer than their window."""
MAPPED_CHUNK = 64
"""The same on CPUs (`Plan.mapped`), where a call takes a time that grows with its tokens: a short
prompt, padded to a chunk, is read in half the time, others wait for half, and long prompts take as
long."""
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
KV_DTYPES = {"bfloat16": jnp.bfloat16, "int8": jnp.int8}


@dataclass(frozen=True)
class JaxOptions:
    """How to run a model with JAX. dtype, mapped and chunk: None takes what suits the platform."""

    slots: int = 4
    max_len: int = 2048
    k: int = 4
    width: int | None = None
    """Tokens per row and call; None: the narrowest of WIDTHS that holds K + 1. A draft model
    need not be exact, and takes no more than it is fed."""
    dtype: str | None = None
    kv_dtype: str | None = None
    """What keys and values are cached in: one of KV_DTYPES; None: as wide as dtype."""
    narrow: Narrow | None = None
    """What linears are rounded to while loading, where the file has them wide."""
    features: tuple[int, ...] = ()
    tp: int = 1
    mapped: bool | None = None
    chunk: int | None = None
    vision: VisionSpec | None = None
    """The checkpoint's image side; None: it is not read."""


def width_for(k: int) -> int:
    """The verify width for drafts of up to k tokens; raises UserError for K < 0 or K > 31."""
    if not 0 <= k <= MAX_DRAFT:
        raise UserError(f"K must be 0 to {MAX_DRAFT}, got {k}")
    return next(width for width in WIDTHS if k < width)


def load_target(path: Path, options: JaxOptions, suppress: tuple[int, ...] = ()) -> JaxTarget:
    """Check, read, place. Raises UserError with one line for anything wrong in the folder or the
    options, and does so before gigabytes are read."""
    arch = read_arch(path)
    plan, mesh, dtype = make_plan(arch, options), make_mesh(options.tp), wide_dtype(options)
    spec, encoder = options.vision, None
    files = None if spec is None else VisionFiles(path, spec, arch.hidden)
    params = load_params(Checkpoint(path, arch), arch, dtype, options.narrow, mesh)
    if spec is not None and files is not None:
        encoder = PictureEncoder(spec, load_vision(files, spec, dtype, mesh), arch.eps)
    return JaxTarget(plan, params, dtype, suppress, mesh, kv_dtype_of(options), encoder)


def random_target(arch: Arch, options: JaxOptions, seed: int = 0) -> JaxTarget:
    """A model of this architecture with random weights (speed tests), the same for any split."""
    plan, mesh, dtype = make_plan(arch, options), make_mesh(options.tp), wide_dtype(options)
    params = random_params(arch, seed, dtype, options.narrow, mesh)
    return JaxTarget(plan, params, dtype, mesh=mesh, kv_dtype=kv_dtype_of(options))


def narrowed(target: JaxTarget) -> JaxTarget:
    """The same weights at width 1: the fastest plain decoding, but not bitwise the wide one."""
    plan = replace(target.plan, width=1)
    return JaxTarget(
        plan, target.params, target.dtype, target.suppress, target.mesh, target.kv_dtype
    )


def make_plan(arch: Arch, options: JaxOptions) -> Plan:
    if options.slots < 1:
        raise UserError(f"--slots must be 1 or more, got {options.slots}")
    if not SHORTEST <= options.max_len <= arch.max_position:
        raise UserError(
            f"--max-len must be {SHORTEST} to {arch.max_position} (this model's limit), "
            f"got {options.max_len}"
        )
    mapped = options.mapped if options.mapped is not None else jax.default_backend() == "cpu"
    return Plan(
        arch,
        options.slots,
        options.max_len,
        options.width or width_for(options.k),
        min(options.chunk or (MAPPED_CHUNK if mapped else CHUNK), options.max_len),
        options.features,
        mapped,
        0 if options.vision is None else options.vision.budget,
    )


def make_mesh(tp: int) -> jax.sharding.Mesh | None:
    """A mesh of `tp` devices on axis `tp`, None for one device."""
    if tp < 1:
        raise UserError(f"--tp must be 1 or more, got {tp}")
    if tp == 1:
        return None
    if tp > jax.device_count():
        raise UserError(f"tp={tp} needs {tp} devices, JAX sees {jax.device_count()}")
    return jax.sharding.Mesh(np.array(jax.devices()[:tp]), ("tp",))


def wide_dtype(options: JaxOptions) -> Any:
    """Of all that is not quantised."""
    suits = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return _named(options.dtype or suits, DTYPES)


def kv_dtype_of(options: JaxOptions) -> Any:
    """Of cached keys and values; None: as wide as `wide_dtype`."""
    return None if options.kv_dtype is None else _named(options.kv_dtype, KV_DTYPES)


def _named(name: str, known: dict[str, Any]) -> Any:
    if name not in known:
        raise UserError(f"unknown dtype {name!r}: choose one of {', '.join(known)}")
    return known[name]
