"""Pictures to soft tokens in JAX: the tower of E2B, E4B, 26B-A4B and 31B, and 12B's encoder-free
form.

A picture is encoded alone, by one program at a padded shape, so that its rows are a function of its
pixels. Formulas: transformers 5.24 `models/gemma4` and its unified form; checked against
their numbers by tests/targets/test_vision_parity.py.

Shape legend: P patches, of which `count` are real; V values of a patch, D the encoder's width,
N heads, d head_dim, L layers, S soft tokens, H hidden size of the text model.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specdec.core.pictures import Picture
from specdec.core.types import Array
from targets.jax.layers import MASKED, project, rms_norm
from targets.jax.placing import put, replicated
from targets.vision.files import VisionFiles
from targets.vision.spec import LAYER_NORM_EPS, PROJECTOR, TowerSpec, VisionSpec
from targets.vision.tensors import (
    EMBEDDER,
    PATCHES,
    STD_BIAS,
    STD_SCALE,
    TABLE,
    TOWER,
    layer_tensors,
)

LEVEL = np.float32(1 / 255)
"""A pixel of 8 bits is its level times this."""
CELLS_AT_ONCE = 35
"""Soft tokens' patches that attend at a time: a divisor of every budget. It bounds the scores."""


class VisionWeights(NamedTuple):
    """top: tensors outside the layers, by their names without what stands before; layers: by name
    [L, ...], empty for an encoder-free form."""

    top: dict[str, Array]
    layers: dict[str, Array]


class Patched(NamedTuple):
    """One picture's patches: levels [P, V] uint8, positions [P, 2] int32, count int32."""

    levels: Array
    positions: Array
    count: Array


def load_vision(
    files: VisionFiles, spec: VisionSpec, dtype: Any, mesh: Mesh | None = None
) -> VisionWeights:
    """Read and place, whole on each device. Raises UserError."""

    def place(values: np.ndarray) -> Array:
        return put(values.astype(dtype), replicated(mesh))

    prefix = EMBEDDER if spec.tower is None else TOWER
    names = [name for name in files.shapes if ".layers." not in name]
    top = {name.removeprefix(prefix): place(files.read(name)) for name in names}
    if spec.tower is None:
        return VisionWeights(top, {})
    layers = range(spec.tower.layers)
    stacks = {
        name: place(np.stack([files.read(f"{TOWER}encoder.layers.{i}.{name}") for i in layers]))
        for name in layer_tensors(spec)
    }
    return VisionWeights(top, stacks)


class PictureEncoder:
    """Encodes one picture at a time."""

    def __init__(self, spec: VisionSpec, weights: VisionWeights, eps: float) -> None:
        """eps: of the projector's norm, the text model's."""
        self.spec, self.weights, self.eps = spec, weights, eps

    def encode(self, picture: Picture) -> np.ndarray:
        """-> soft tokens [S, H] in the weights' dtype, in host memory, where they are put among the
        rows of a call: cut on the device, each number of them would be a program."""
        padded = self.spec.padded(picture.tokens) * self.spec.patches.pool**2
        count = len(picture.levels)
        levels = np.zeros((padded, self.spec.patch_values), np.uint8)
        positions = np.zeros((padded, 2), np.int32)
        levels[:count], positions[:count] = picture.levels, picture.positions
        patched = Patched(levels, positions, np.int32(count))
        rows = np.asarray(_compiled(self.spec, self.eps)(self.weights, patched))
        return rows[: picture.tokens].copy()


@lru_cache(maxsize=8)
def _compiled(spec: VisionSpec, eps: float) -> Any:
    def program(weights: VisionWeights, patched: Patched) -> Array:
        return soft_tokens(spec, eps, weights, patched)

    return jax.jit(program)


def soft_tokens(spec: VisionSpec, eps: float, weights: VisionWeights, patched: Patched) -> Array:
    """[P / pool ** 2, H]; rows behind the picture's own are anything."""
    with jax.named_scope("vision"):
        rows = _embedded(spec, weights, patched) if spec.tower is None else None
        if rows is None:
            rows = _tower_rows(spec, weights, patched)
        return project(rms_norm(rows, None, eps), weights.top[PROJECTOR])


def _embedded(spec: VisionSpec, weights: VisionWeights, patched: Patched) -> Array:
    """12B: a patch is a row [P, D]."""
    top, (x, y) = weights.top, patched.positions.T
    h = (patched.levels.astype(jnp.float32) * LEVEL).astype(top["patch_dense.weight"].dtype)
    h = _layer_norm(h, top, "patch_ln1")
    h = project(h, top["patch_dense.weight"]) + top["patch_dense.bias"]
    h = _layer_norm(h, top, "patch_ln2")
    table = top["pos_embedding"]
    h = h + (table[x, 0] + table[y, 1])
    return _layer_norm(h, top, "pos_norm")


def _layer_norm(x: Array, top: dict[str, Array], name: str) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + LAYER_NORM_EPS)
    weight, bias = (top[f"{name}.{part}"].astype(jnp.float32) for part in ("weight", "bias"))
    return (wide * weight + bias).astype(x.dtype)


def _tower_rows(spec: VisionSpec, weights: VisionWeights, patched: Patched) -> Array:
    """[S, D]: patches through the layers, pooled by cells."""
    tower, top = spec.tower, weights.top
    assert tower is not None
    pixels = 2 * (patched.levels.astype(jnp.float32) * LEVEL - 0.5)
    h = project(pixels.astype(top[PATCHES].dtype), top[PATCHES])
    x, y = patched.positions.T
    h = h + (top[TABLE][0, x] + top[TABLE][1, y])
    tables = _rope_tables(tower, patched.positions, h.dtype)
    real = jnp.arange(len(h)) < patched.count

    def layer(h: Array, w: dict[str, Array]) -> tuple[Array, None]:
        return _layer(spec, tower, w, h, tables, real), None

    h, _ = jax.lax.scan(layer, h, weights.layers)
    return _pooled(spec, top, h)


def _pooled(spec: VisionSpec, top: dict[str, Array], h: Array) -> Array:
    """[P, D] -> [S, D]; means and the factor in float32."""
    cells = h.astype(jnp.float32).reshape(-1, spec.patches.pool**2, spec.width)
    rows = cells.mean(1).astype(h.dtype).astype(jnp.float32) * math.sqrt(spec.width)
    if STD_BIAS in top:
        rows = (rows - top[STD_BIAS].astype(jnp.float32)) * top[STD_SCALE].astype(jnp.float32)
    return rows.astype(h.dtype)


def _layer(
    spec: VisionSpec,
    tower: TowerSpec,
    w: dict[str, Array],
    h: Array,
    tables: tuple[Array, Array],
    real: Array,
) -> Array:
    """One layer on h [P, D]; real [P]: which keys are patches."""
    heads = (len(h), tower.heads, tower.head_dim)
    x = rms_norm(h, w["input_layernorm.weight"], spec.eps)
    q, k, v = (_linear(x, w, f"self_attn.{part}_proj").reshape(heads) for part in "qkv")
    q = _rotate(rms_norm(q, w["self_attn.q_norm.weight"], spec.eps), tables)
    k = _rotate(rms_norm(k, w["self_attn.k_norm.weight"], spec.eps), tables)
    v = rms_norm(v, None, spec.eps)
    block = CELLS_AT_ONCE * spec.patches.pool**2
    mixed = _linear(_attend(q, k, v, real, block), w, "self_attn.o_proj")
    h = h + rms_norm(mixed, w["post_attention_layernorm.weight"], spec.eps)
    x = rms_norm(h, w["pre_feedforward_layernorm.weight"], spec.eps)
    gate = jax.nn.gelu(_linear(x, w, "mlp.gate_proj"), approximate=True)
    x = _linear(gate * _linear(x, w, "mlp.up_proj"), w, "mlp.down_proj")
    return h + rms_norm(x, w["post_feedforward_layernorm.weight"], spec.eps)


def _linear(x: Array, w: dict[str, Array], name: str) -> Array:
    """A linear layer; inputs and outputs are clamped where it has bounds."""
    weight = w[f"{name}.linear.weight"]
    if f"{name}.input_min" not in w:
        return project(x, weight)
    x = jnp.clip(x, w[f"{name}.input_min"], w[f"{name}.input_max"])
    return jnp.clip(project(x, weight), w[f"{name}.output_min"], w[f"{name}.output_max"])


def _rope_tables(tower: TowerSpec, positions: Array, dtype: Any) -> tuple[Array, Array]:
    """cos and sin [P, 1, 2, d / 2] of positions [P, 2]: the head's first half turns by x, its
    second by y."""
    half = tower.head_dim // 2
    exponent = jnp.arange(half // 2, dtype=jnp.float32) * (2.0 / half)
    inverse = tower.theta**-exponent
    angles = positions[:, None, :, None].astype(jnp.float32) * jnp.concatenate([inverse, inverse])
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def _rotate(x: Array, tables: tuple[Array, Array]) -> Array:
    """x [P, N, d]: in each half of a head, pairs (j, j + d / 4) turn."""
    cos, sin = tables
    halves = x.reshape(*x.shape[:-1], 2, -1)
    low, high = jnp.split(halves, 2, -1)
    return (halves * cos + jnp.concatenate([-high, low], -1) * sin).reshape(x.shape)


def _attend(q: Array, k: Array, v: Array, real: Array, block: int) -> Array:
    """q, k, v [P, N, d] -> [P, N * d]. No 1 / sqrt(d): q and k are normed. Softmax in float32;
    patches that are padding weigh exactly 0 as keys."""

    def some(q: Array) -> Array:
        scores = jnp.einsum("qnd,knd->nqk", q, k, preferred_element_type=jnp.float32)
        shares = jax.nn.softmax(jnp.where(real, scores, MASKED), -1).astype(v.dtype)
        mixed = jnp.einsum("nqk,knd->qnd", shares, v, preferred_element_type=jnp.float32)
        return mixed.astype(v.dtype)

    return jax.lax.map(some, q.reshape(-1, block, *q.shape[1:])).reshape(len(q), -1)
