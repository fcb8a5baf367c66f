"""A block drafter in training: a block from every position of packed rows at once.

Row i is what a draft sees whose anchor is token i + 1: the context is what the target made of
tokens 0 .. i of its document, and slot j stands at position i + 1 + j.

Shape legend: B rows, T tokens, U slots of a block, H hidden, K kv heads, G query heads per kv head,
D head_dim.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from drafters.dflash.jax.body import Weights, keys_values, layer_of, layer_step
from drafters.dflash.spec import BlockLayer, BlockSpec
from specdec.core.types import Array
from targets.jax.layers import MASKED, rms_norm, rope_tables


class _Context(NamedTuple):
    """Of one layer: k, v [B, T, K, D], and seen [B, T, U, T]."""

    k: Array
    v: Array
    seen: Array


def unroll(
    weights: Weights, spec: BlockSpec, fused: Array, embedded: Array, documents: Array
) -> Array:
    """The slots' states after the final norm [B, T, U, H]. fused [B, T, H]: `body.context` of the
    target's features; embedded [B, T, U, H]: each position's block; documents [B, T] int32:
    positions of different ones don't see each other."""
    batch, tokens, slots, _ = embedded.shape
    ahead = jnp.arange(tokens)[:, None] + 1 + jnp.arange(slots)  # [T, U]
    before = rope_tables(spec.body.rope, spec.body.head_dim, jnp.arange(tokens)[None])
    turning = rope_tables(spec.body.rope, spec.body.head_dim, jnp.tile(ahead, (batch, 1)))
    x = embedded.reshape(batch * tokens, slots, -1)
    for number, layer in enumerate(spec.body.layers):
        own = layer_of(weights, number)
        context = _Context(
            *keys_values(own, spec.body, fused, before), _visible(layer, ahead, documents)
        )
        x = layer_step(own, spec.body, x, turning, partial(_attend, layer.causal, context))
    return rms_norm(x, weights["norm"], spec.body.eps).reshape(embedded.shape)


def _visible(layer: BlockLayer, ahead: Array, documents: Array) -> Array:
    """[B, T, U, T]: which positions slots at `ahead` [T, U] of each row see."""
    key = jnp.arange(documents.shape[1])
    seen = key <= key[:, None, None]  # [T, 1, T]
    seen = jnp.broadcast_to(seen, (*ahead.shape, len(key)))
    if layer.window is not None:
        seen &= key > ahead[..., None] - layer.window
    same = documents[:, :, None] == documents[:, None]
    return seen[None] & same[:, :, None]


def _attend(causal: bool, context: _Context, q: Array, own_k: Array, own_v: Array) -> Array:
    """`body.Exchange`: one softmax over the row's context and its own block."""
    batch, tokens, kv_heads, dim = context.k.shape
    slots, rows = q.shape[1], (batch, tokens, q.shape[1])
    grouped = q.reshape(*rows, kv_heads, -1, dim)
    own_k, own_v = own_k.reshape(*rows, kv_heads, dim), own_v.reshape(*rows, kv_heads, dim)
    wide = {"preferred_element_type": jnp.float32}
    first = jnp.einsum("btukgd,bskd->btukgs", grouped, context.k, **wide)
    first = jnp.where(context.seen[:, :, :, None, None], first, MASKED)
    own = jnp.einsum("btukgd,btwkd->btukgw", grouped, own_k, **wide)
    if causal:
        earlier = jnp.arange(slots) <= jnp.arange(slots)[:, None]
        own = jnp.where(earlier[:, None, None], own, MASKED)
    shares = jax.nn.softmax(jnp.concatenate([first, own], -1), -1).astype(q.dtype)
    mixed = jnp.einsum("btukgs,bskd->btukgd", shares[..., :tokens], context.v, **wide)
    mixed += jnp.einsum("btukgw,btwkd->btukgd", shares[..., tokens:], own_v, **wide)
    return mixed.reshape(batch * tokens, slots, -1)
