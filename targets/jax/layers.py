"""The pieces of one Gemma 4 decoder layer, as pure functions.

Shape legend: B batch, T tokens, H hidden, N query heads, K kv heads, G = N / K, D head_dim,
S cache entries, F feed-forward width, E experts, V vocabulary.
Formulas: transformers 5.23 `models/gemma4/modeling_gemma4.py`; checked by
tests/targets/jax/test_parity.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specdec.core.types import Array
from targets.arch import LayerSpec, Rope
from targets.jax.cache import Entries, Rounded, numbers
from targets.jax.params import Grouped, Quantized, SpreadWeight

MASKED = -1e30
"""Score of an invisible key: exp underflows to exactly 0, so its value adds exactly nothing."""


def project(x: Array, weight: Any) -> Array:
    """x [..., in] times weight [out, in] -> [..., out] in x's dtype, accumulated in float32."""
    return project_wide(x, weight).astype(x.dtype)


def project_wide(x: Array, weight: Any) -> Array:
    """As `project`, in float32.

    Quantised weights are read as they are stored: the convert fuses into the dot's operand, with
    the scales of groups; a per-channel scale is applied to the float32 result.
    """
    if isinstance(weight, Quantized):
        return _dot(x, weight.values.astype(x.dtype)) * weight.scale
    if isinstance(weight, Grouped):
        return _project_groups(x, weight)
    return _dot(x, weight)


def _project_groups(x: Array, weight: Grouped) -> Array:
    """The sum over groups and what they hold is one dot's."""
    count, size = weight.values.shape[-2:]
    values = weight.values.astype(jnp.float32)
    if weight.zero is not None:
        values -= weight.zero[..., None].astype(jnp.float32)
    values = (values * weight.groups[..., None].astype(jnp.float32)).astype(x.dtype)
    short = [(0, 0)] * (x.ndim - 1) + [(0, count * size - x.shape[-1])]
    parts = jnp.pad(x, short).reshape(*x.shape[:-1], count, size)
    out = jnp.einsum("...gi,ogi->...o", parts, values, preferred_element_type=jnp.float32)
    return out if weight.scale is None else out * weight.scale


def project_spread(x: Array, weight: Any) -> Array:
    """`project`; where each device holds a part of the outputs, it makes those, and all get all.

    For outputs that are cut into other pieces than the devices': left to itself, the partitioner
    exchanges them piece by piece.
    """
    if not isinstance(weight, SpreadWeight):
        return project(x, weight)

    def one_device(x: Array, weight: Any) -> Array:
        return jax.lax.all_gather(project(x, weight), "tp", axis=x.ndim - 1, tiled=True)

    whole = PartitionSpec()
    specs = (whole, weight.parts)
    spread = jax.shard_map(
        one_device, mesh=weight.mesh, in_specs=specs, out_specs=whole, check_vma=False
    )
    return spread(x, weight.weight)


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


RopeTables = dict[tuple[Rope, int], tuple[Array, Array]]
"""`rope_tables` by rope and head_dim."""


def tables_of(specs: Iterable[LayerSpec], positions: Array) -> RopeTables:
    """The rotary tables of these layers."""
    kinds = {(spec.rope, spec.head_dim): None for spec in specs}
    return {kind: rope_tables(*kind, positions) for kind in kinds}


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


def rotating(x: Array, rope: Rope) -> Array:
    """The dimensions of x [..., D] that RoPE turns: [..., 2 * rotated]."""
    low, high = jnp.split(x, 2, -1)
    return jnp.concatenate([low[..., : rope.rotated], high[..., : rope.rotated]], -1)


def queries_in_parts(q: Array, layer: LayerSpec, key_norm: Array) -> tuple[Array, Array]:
    """Queries for keys that were not kept: k = RoPE(w * v), so q . k is the product of what turns
    with the keys' turning dimensions, and of the rest of q * w with the values themselves.

    q [B, T, N, D], key_norm w [D] -> ([B, T, N, 2 * rotated], [B, T, N, D]).
    """
    still = jnp.arange(layer.head_dim) % (layer.head_dim // 2) >= layer.rope.rotated
    return rotating(q, layer.rope), jnp.where(still, q * key_norm.astype(q.dtype), 0)


Parts = tuple[Any, ...]
"""Parts of queries, or of keys. The parts' products are added."""


def attend(q: Array, k: Array, v: Array, visible: Array) -> Array:
    """q [B, T, N, D], k and v [B, S, K, D], visible [B, T, S] -> [B, T, N * D].

    No 1 / sqrt(D): q and k are normed. Softmax in float32; an invisible key weighs exactly 0.
    """
    return attend_parts((q,), (k,), v, visible)


def attend_parts(q: Parts, k: Parts, v: Entries, visible: Array) -> Array:
    """`attend` where q and k come in parts."""
    weights = jax.nn.softmax(_scores(q, k, visible), -1)
    return _rows(_mix(weights, v, q[0].dtype), q[0].dtype)


class Running(NamedTuple):
    """Softmax so far, float32: best score and sum of weights [B, K, G, T, 1], and the weighted
    sum of values [B, K, G, T, D] (Milakov and Gimelshein, arXiv 1805.02867)."""

    best: Array
    total: Array
    mixed: Array


def attend_blocks(
    q: Parts, block: Callable[[Array], tuple[Parts, Entries, Array]], count: Array
) -> Array:
    """`attend_parts` over blocks 0 .. count - 1 in ascending order, where block(i) is
    (k, v, visible).

    Each row must see an entry of block 0. A block of which a row sees nothing then leaves its
    result as it is, bit for bit: it may be read or not.
    """

    def body(i: Array, so_far: Running) -> Running:
        k, v, visible = block(i)
        scores = _scores(q, k, visible)
        best = jnp.maximum(so_far.best, scores.max(-1, keepdims=True))
        weights, faded = jnp.exp(scores - best), jnp.exp(so_far.best - best)
        total = so_far.total * faded + weights.sum(-1, keepdims=True)
        return Running(best, total, so_far.mixed * faded + _mix(weights, v, dtype))

    batch, tokens, heads, _ = q[0].shape
    *_, kv_heads, dim = numbers(jax.eval_shape(block, jnp.int32(0))[1]).shape
    rows, dtype = (batch, kv_heads, heads // kv_heads, tokens), q[0].dtype
    start = Running(jnp.full((*rows, 1), MASKED), jnp.zeros((*rows, 1)), jnp.zeros((*rows, dim)))
    _, total, mixed = jax.lax.fori_loop(0, count, body, start)
    return _rows(mixed / total, dtype)


def _scores(q: Parts, k: Parts, visible: Array) -> Array:
    """[B, K, G, T, S] float32, MASKED where a query may not look."""
    products = [_products(*pair) for pair in zip(q, k, strict=True)]
    return jnp.where(visible[:, None, None], sum(products[1:], products[0]), MASKED)


def _products(q: Array, k: Entries) -> Array:
    values = numbers(k)
    grouped = q.reshape(*q.shape[:2], values.shape[2], -1, q.shape[3])
    scores = jnp.einsum(
        "btkgd,bskd->bkgts", grouped, values.astype(q.dtype), preferred_element_type=jnp.float32
    )
    return scores * k.scale[:, :, None, None] if isinstance(k, Rounded) else scores


def _mix(weights: Array, v: Entries, dtype: Any) -> Array:
    """weights [B, K, G, T, S] float32 over values [B, S, K, D] -> [B, K, G, T, D] float32; the
    product is of numbers in `dtype`."""
    if isinstance(v, Rounded):
        weights = weights * v.scale[:, :, None, None]
    return jnp.einsum(
        "bkgts,bskd->bkgtd",
        weights.astype(dtype),
        numbers(v).astype(dtype),
        preferred_element_type=jnp.float32,
    )


def _rows(mixed: Array, dtype: Any) -> Array:
    """[B, K, G, T, D] -> [B, T, N * D]."""
    batch, _, _, tokens, _ = mixed.shape
    return jnp.moveaxis(mixed.astype(dtype), 3, 1).reshape(batch, tokens, -1)
