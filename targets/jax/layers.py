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
from targets.arch import LayerSpec, MoeSpec, Rope
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


def gated_mlp(x: Array, w: dict[str, Any]) -> Array:
    gate = jax.nn.gelu(project(x, w["mlp.gate_proj"]), approximate=True)
    return project(gate * project(x, w["mlp.up_proj"]), w["mlp.down_proj"])


def feed_forward(h: Array, w: dict[str, Any], moe: MoeSpec | None, eps: float) -> Array:
    """The feed-forward branch of stream h [B, T, H], its own norms included."""
    out = gated_mlp(rms_norm(h, w["pre_feedforward_layernorm"], eps), w)
    if moe:
        out = rms_norm(out, w["post_feedforward_layernorm_1"], eps)
        out = out + rms_norm(mixture(h, w, moe, eps), w["post_feedforward_layernorm_2"], eps)
    return rms_norm(out, w["post_feedforward_layernorm"], eps)


def route(h: Array, w: dict[str, Any], moe: MoeSpec, eps: float) -> tuple[Array, Array]:
    """Experts and their weights [B, T, top_k] from the raw stream (not the pre-normed one)."""
    x = rms_norm(h, None, eps) * w["router.scale"] * jnp.asarray(h.shape[-1] ** -0.5, h.dtype)
    shares = jax.nn.softmax(project(x, w["router.proj"]).astype(jnp.float32), -1)
    top, experts = jax.lax.top_k(shares, moe.top_k)
    top = top / top.sum(-1, keepdims=True)
    return experts, top * w["router.per_expert_scale"][experts].astype(jnp.float32)


def mixture(h: Array, w: dict[str, Any], moe: MoeSpec, eps: float) -> Array:
    """The routed experts' sum [B, T, H]; each row sums its own experts, in expert order.

    A scan over the experts reads every expert once. Where fewer (row, expert) pairs than experts
    are needed, only those are gathered and read.
    """
    experts, shares = route(h, w, moe, eps)
    x = rms_norm(h, w["pre_feedforward_layernorm_2"], eps)
    pairs = experts.size
    sum_up = _gathered if pairs < moe.experts else _scanned
    rows = sum_up(
        x.reshape(-1, h.shape[-1]),
        experts.reshape(-1, moe.top_k),
        shares.reshape(-1, moe.top_k),
        w,
        moe,
    )
    return rows.astype(h.dtype).reshape(h.shape)


def _expert(x: Array, gate_up: Any, down: Any) -> Array:
    gate, up = jnp.split(project(x, gate_up), 2, -1)
    return project(jax.nn.gelu(gate, approximate=True) * up, down).astype(jnp.float32)


def _scanned(x: Array, experts: Array, shares: Array, w: dict[str, Any], moe: MoeSpec) -> Array:
    def add(total: Array, expert: Any) -> tuple[Array, None]:
        number, gate_up, down = expert
        share = jnp.where(experts == number, shares, 0.0).sum(-1, keepdims=True)
        return total + share * _expert(x, gate_up, down), None

    every = (jnp.arange(moe.experts), w["experts.gate_up_proj"], w["experts.down_proj"])
    return jax.lax.scan(add, jnp.zeros(x.shape, jnp.float32), every)[0]


def _gathered(x: Array, experts: Array, shares: Array, w: dict[str, Any], moe: MoeSpec) -> Array:
    def row(x_row: Array, experts_row: Array, shares_row: Array) -> Array:
        order = jnp.argsort(experts_row)

        def add(total: Array, pick: Any) -> tuple[Array, None]:
            number, share = pick
            at = lambda tensor: jax.tree.map(lambda leaf: leaf[number], tensor)  # noqa: E731
            out = _expert(x_row, at(w["experts.gate_up_proj"]), at(w["experts.down_proj"]))
            return total + share * out, None

        picks = (experts_row[order], shares_row[order])
        return jax.lax.scan(add, jnp.zeros(x_row.shape, jnp.float32), picks)[0]

    return jax.lax.map(lambda args: row(*args), (x, experts, shares))
