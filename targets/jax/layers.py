"""The pieces of one Gemma 4 decoder layer, as pure functions.

Shape legend: B batch, T tokens, H hidden, N query heads, K kv heads, G = N / K, D head_dim,
S cache entries, F feed-forward width, E experts, V vocabulary.
Formulas: transformers 5.23 `models/gemma4/modeling_gemma4.py`; checked by tests/test_parity.py.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from specdec.types import Array
from targets.arch import LayerSpec, Rope
from targets.jax.params import Quantized

MASKED = -1e30
"""Score of an invisible key: exp underflows to exactly 0, so its value adds exactly nothing."""


def project(x: Array, weight: Any) -> Array:
    """x [..., in] times weight [out, in] -> [..., out] in x's dtype, accumulated in float32.

    Quantised weights are read as they are stored: the convert fuses into the dot's operand, and
    the per-channel scale is applied to the float32 result.
    """
    if isinstance(weight, Quantized):
        wide = _dot(x, weight.values.astype(x.dtype))
        return (wide * weight.scale).astype(x.dtype)
    return _dot(x, weight).astype(x.dtype)


def _dot(x: Array, weight: Array) -> Array:
    return jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=jnp.float32)


def rms_norm(x: Array, weight: Array | None, eps: float) -> Array:
    """Plain `weight`, not 1 + weight; float32 inside, x's dtype outside."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    if weight is not None:
        wide = wide * weight.astype(jnp.float32)
    return wide.astype(x.dtype)


def rope_tables(rope: Rope, head_dim: int, positions: Array) -> tuple[Array, Array]:
    """cos and sin [..., 1, D] float32 for positions [...]; pairs that don't rotate get angle 0."""
    half = head_dim // 2
    exponent = jnp.arange(half, dtype=jnp.float32) * (2.0 / head_dim)
    inverse = jnp.where(jnp.arange(half) < rope.rotated, rope.theta**-exponent / rope.factor, 0.0)
    angles = positions[..., None, None].astype(jnp.float32) * jnp.concatenate([inverse, inverse])
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, tables: tuple[Array, Array]) -> Array:
    """NeoX pairing (i, i + D / 2) of x [..., heads, D]."""
    cos, sin = (t.astype(x.dtype) for t in tables)
    low, high = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate([-high, low], -1) * sin


def queries(x: Array, w: dict[str, Any], layer: LayerSpec, tables: Any, eps: float) -> Array:
    """x [B, T, H] -> q [B, T, N, D], normed and rotated."""
    q = project(x, w["self_attn.q_proj"])
    q = q.reshape(*x.shape[:-1], layer.heads, layer.head_dim)
    return rotate(rms_norm(q, w["self_attn.q_norm"], eps), tables)


def keys_values(
    x: Array, w: dict[str, Any], layer: LayerSpec, tables: Any, eps: float
) -> tuple[Array, Array]:
    """x [B, T, H] -> k, v [B, T, K, D]. With k_eq_v the values are the raw keys, normed alone."""
    shape = (*x.shape[:-1], layer.kv_heads, layer.head_dim)
    raw = project(x, w["self_attn.k_proj"]).reshape(shape)
    value = raw if layer.k_eq_v else project(x, w["self_attn.v_proj"]).reshape(shape)
    k = rotate(rms_norm(raw, w["self_attn.k_norm"], eps), tables)
    return k, rms_norm(value, None, eps)


def attend(q: Array, k: Array, v: Array, visible: Array) -> Array:
    """q [B, T, N, D], k and v [B, S, K, D], visible [B, T, S] -> [B, T, N * D].

    No 1 / sqrt(D): q and k are normed. Softmax in float32; an invisible key weighs exactly 0.
    """
    batch, tokens, heads, dim = q.shape
    grouped = q.reshape(batch, tokens, k.shape[2], -1, dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, k, preferred_element_type=jnp.float32)
    scores = jnp.where(visible[:, None, None], scores, MASKED)
    weights = jax.nn.softmax(scores, -1).astype(v.dtype)
    mixed = jnp.einsum("bkgts,bskd->btkgd", weights, v, preferred_element_type=jnp.float32)
    return mixed.astype(q.dtype).reshape(batch, tokens, heads * dim)
