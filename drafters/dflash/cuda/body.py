"""A block drafter's forward in plain torch, on any device: no shape depends on what was accepted,
and nothing waits for the host, so a cycle captures it. The mathematics, and the JAX twin:
`../jax/body.py`.

Shape legend: B rows, T tokens, U slots of a block, H hidden, F features, K kv heads, G query heads
per kv head, D head_dim, S cache entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.dflash.cuda.convolution import convolved
from drafters.dflash.spec import BlockLayer, BlockSpec, Body
from targets.cuda.formulas import MASKED, inverse_frequencies, rms, rotate
from targets.cuda.upload import as_tensor, upload

NORMS = 1
"""Dimensions of weights that stay float32."""

Weights = dict[str, Tensor]
"""By the names of `drafters.dflash.spec.tensors`."""


class LayerCache(NamedTuple):
    """k, v [slots + 1, K, S + 1, D]: position p lies in entry p mod S. The last row takes what idle
    rows would write, and the last entry what is not kept."""

    k: Tensor
    v: Tensor

    @property
    def size(self) -> int:
        """S."""
        return self.k.shape[2] - 1


@dataclass(frozen=True)
class Placed:
    """A head's weights on a device, in `dtype`; vectors in float32."""

    spec: BlockSpec
    weights: Weights
    inverse: Tensor
    """[D / 2]: radians per position."""
    dtype: torch.dtype


def place(
    spec: BlockSpec, weights: dict[str, np.ndarray], dtype: torch.dtype, device: torch.device
) -> Placed:
    def one(values: np.ndarray) -> Tensor:
        wide = torch.float32 if values.ndim == NORMS else dtype
        return upload(as_tensor(np.ascontiguousarray(values)), str(device)).to(wide)

    inverse = inverse_frequencies(spec.body.rope, spec.body.head_dim, device)
    return Placed(spec, {name: one(values) for name, values in weights.items()}, inverse, dtype)


def entries(layer: BlockLayer, longest: int) -> int:
    """Cache entries S of a layer, as in JAX: only accepted tokens are written."""
    return min(layer.window or longest, longest)


def make_caches(placed: Placed, slots: int, longest: int) -> tuple[LayerCache, ...]:
    """Zeros."""
    body, device = placed.spec.body, placed.inverse.device

    def one(layer: BlockLayer) -> LayerCache:
        shape = (slots + 1, body.kv_heads, entries(layer, longest) + 1, body.head_dim)
        made = (torch.zeros(shape, dtype=placed.dtype, device=device) for _ in LayerCache._fields)
        return LayerCache(*made)

    return tuple(map(one, body.layers))


def inject(
    placed: Placed,
    caches: tuple[LayerCache, ...],
    features: Tensor,
    slot: Tensor,
    positions: Tensor,
) -> None:
    """Write the entries of features [B, T, F] at positions [B, T] of slots [B] (-1: idle). A
    negative position is not kept: what a verify rejected never enters."""
    w, body = placed.weights, placed.spec.body
    fused = rms(F.linear(features.to(placed.dtype), w["fc"]), w["hidden_norm"], body.eps)
    fused = fused.to(placed.dtype)
    angles = _angles(placed, positions)
    newest = positions.amax(1, keepdim=True)
    for number, cache in enumerate(caches):
        k, v = _keys_values(layer_of(w, number), body, fused, angles)
        lasting = (positions >= 0) & (positions > newest - cache.size)
        where = torch.where(lasting, positions % cache.size, cache.size)
        at = slot.long()[:, None], slice(None), where
        cache.k[at], cache.v[at] = k.to(placed.dtype), v.to(placed.dtype)


def block(
    placed: Placed,
    caches: tuple[LayerCache, ...],
    embedded: Tensor,
    slot: Tensor,
    start: Tensor,
) -> Tensor:
    """The slots' states before the final norm [B, U, H] float32, of embedded [B, U, H] float32: a
    text's newest token, at position start [B], then mask tokens."""
    spec, x = placed.spec, embedded
    positions = start[:, None].long() + torch.arange(spec.slots, device=start.device)
    angles = _angles(placed, positions)
    for number, (layer, cache) in enumerate(zip(spec.body.layers, caches, strict=True)):
        own = layer_of(placed.weights, number)
        seen = visible(layer, positions, start, cache.size)
        step = _gemma_layer if spec.body.gemma else _qwen3_layer
        held = LayerCache(*(part[slot.long(), :, :-1] for part in cache))
        x = step(own, placed, x, angles, held, seen)
    return x


def normed(placed: Placed, x: Tensor) -> Tensor:
    """The slots' states after the final norm."""
    return rms(x, placed.weights["norm"], placed.spec.body.eps)


def visible(layer: BlockLayer, positions: Tensor, start: Tensor, size: int) -> Tensor:
    """[B, U, S + U]: what slots at positions [B, U] behind start [B] tokens see, of a cache of
    `size` entries and of the block."""
    last = (start.long() - 1)[:, None]
    entry = torch.arange(size, device=start.device)
    held = (last - (last - entry) % size)[:, None]  # [B, 1, S]
    query = positions[..., None]
    seen = (held >= 0).expand(*positions.shape, size)
    if layer.window is not None:
        seen = seen & (held > query - layer.window)
    slots = torch.arange(positions.shape[1], device=start.device)
    within = slots[None] <= slots[:, None] if layer.causal else torch.ones_like(seen[0, :, :1])
    block_seen = within.expand(*positions.shape, positions.shape[1])
    return torch.cat([seen, block_seen], -1)


def layer_of(weights: Weights, number: int) -> Weights:
    """One layer's weights by their last names."""
    prefix = f"layers.{number}."
    return {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}


def _angles(placed: Placed, positions: Tensor) -> Tensor:
    """[B, T, 1, D / 2]."""
    return positions[..., None, None] * placed.inverse


def _keys_values(w: Weights, body: Body, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """x [B, T, H] -> k, v [B, T, K, D] float32: of the features' context, or of a block."""
    shape = (body.kv_heads, body.head_dim)
    raw = F.linear(x, w["self_attn.k_proj"]).unflatten(-1, shape)
    k = rotate(rms(raw, w["self_attn.k_norm"], body.eps), angles)
    if body.gemma:
        return k, rms(raw, None, body.eps)
    return k, F.linear(x, w["self_attn.v_proj"]).unflatten(-1, shape).float()


def _attention(
    w: Weights, placed: Placed, x: Tensor, angles: Tensor, held: LayerCache, seen: Tensor
) -> Tensor:
    """x [B, U, H], normed -> [B, U, H] float32: one softmax over the cache and the block."""
    body, (batch, slots, _) = placed.spec.body, x.shape
    q = F.linear(x, w["self_attn.q_proj"]).unflatten(-1, (body.heads, body.head_dim))
    q = rotate(rms(q, w["self_attn.q_norm"], body.eps), angles) * body.scale
    k, v = (part.to(placed.dtype).transpose(1, 2) for part in _keys_values(w, body, x, angles))
    keys, values = torch.cat([held.k, k], 2), torch.cat([held.v, v], 2)
    grouped = q.to(placed.dtype).unflatten(2, (body.kv_heads, -1)).permute(0, 2, 3, 1, 4)
    scores = grouped.flatten(2, 3) @ keys.transpose(2, 3)  # [B, K, G U, S + U]
    scores = scores.float().unflatten(2, (-1, slots)).masked_fill(~seen[:, None, None], MASKED)
    shares = scores.softmax(-1).to(placed.dtype).flatten(2, 3)
    mixed = (shares @ values).unflatten(2, (-1, slots)).permute(0, 3, 1, 2, 4)
    return F.linear(mixed.reshape(batch, slots, -1), w["self_attn.o_proj"]).float()


def _qwen3_layer(
    w: Weights, placed: Placed, x: Tensor, angles: Tensor, held: LayerCache, seen: Tensor
) -> Tensor:
    group = placed.spec.body.conv_group
    fed, after = convolved(w, "attention_conv", group, _norm(w, placed, "input_layernorm", x))
    x = x + after(_attention(w, placed, fed, angles, held, seen))
    fed, after = convolved(w, "mlp_conv", group, _norm(w, placed, "post_attention_layernorm", x))
    gate = F.silu(F.linear(fed, w["mlp.gate_proj"]))
    return x + after(_down(w, gate, fed))


def _gemma_layer(
    w: Weights, placed: Placed, x: Tensor, angles: Tensor, held: LayerCache, seen: Tensor
) -> Tensor:
    eps = placed.spec.body.eps
    mixed = _attention(w, placed, _norm(w, placed, "input_layernorm", x), angles, held, seen)
    x = x + rms(mixed, w["post_attention_layernorm"], eps)
    fed = _norm(w, placed, "pre_feedforward_layernorm", x)
    gate = F.gelu(F.linear(fed, w["mlp.gate_proj"]), approximate="tanh")
    return (x + rms(_down(w, gate, fed), w["post_feedforward_layernorm"], eps)) * w["layer_scalar"]


def _down(w: Weights, gate: Tensor, fed: Tensor) -> Tensor:
    return F.linear(gate * F.linear(fed, w["mlp.up_proj"]), w["mlp.down_proj"]).float()


def _norm(w: Weights, placed: Placed, name: str, x: Tensor) -> Tensor:
    """For a linear layer, in its dtype."""
    return rms(x, w[name], placed.spec.body.eps).to(placed.dtype)
