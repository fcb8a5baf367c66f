"""A block drafter's forward: linear layers and norms in the words of `targets.cuda.ops` (our
kernels on a Hopper GPU, plain torch elsewhere), attention in torch. No shape depends on what was
accepted, and nothing waits for the host, so a cycle captures it. The mathematics, and the JAX twin:
`../jax/body.py`.

Shape legend: B rows, T tokens, U slots of a block, H hidden, F features, K kv heads, G query heads
per kv head, D head_dim, S cache entries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.dflash.cuda.convolution import convolved, unchanged
from drafters.dflash.cuda.placing import Layer, Placed
from drafters.dflash.spec import BlockLayer
from targets.cuda.formulas import MASKED, rms
from targets.cuda.ops import Opening, X


class LayerCache(NamedTuple):
    """k, v [slots + 1, K, S + 1, D]: position p lies in entry p mod S. The last row takes what idle
    rows would write, and the last entry what is not kept."""

    k: Tensor
    v: Tensor

    @property
    def size(self) -> int:
        """S."""
        return self.k.shape[2] - 1


class Turning(NamedTuple):
    """Cosines and sines [B, T, 1, D / 2] of rotary positions."""

    cos: Tensor
    sin: Tensor


class Attended(NamedTuple):
    """What a layer's slots attend to: the cache's entries held, and the block itself; mask
    [B, U, S + U] says which of them each sees."""

    turn: Turning
    held: LayerCache
    mask: Tensor


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
    raw = F.linear(features.to(placed.dtype), placed.weights["fc"]).float().flatten(0, 1)
    x = placed.ops.norm(raw, Opening(placed.weights["hidden_norm"], placed.kind))
    turn = turning(placed, positions)
    newest = positions.amax(1, keepdim=True)
    for layer, cache in zip(placed.layers, caches, strict=True):
        k, v = _keys_values(placed, layer, x, turn)
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
    spec, x = placed.spec, embedded.flatten(0, 1)
    positions = start[:, None].long() + torch.arange(spec.slots, device=start.device)
    turn, step = turning(placed, positions), _gemma_layer if spec.body.gemma else _qwen3_layer
    for kind, layer, cache in zip(spec.body.layers, placed.layers, caches, strict=True):
        seen = visible(kind, positions, start, cache.size)
        held = LayerCache(*(part[slot.long(), :, :-1] for part in cache))
        x = step(placed, layer, x, Attended(turn, held, seen))
    return x.view(embedded.shape)


def normed(placed: Placed, x: Tensor) -> Tensor:
    """States [..., H] after the final norm."""
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


def turning(placed: Placed, positions: Tensor) -> Turning:
    """For positions [B, T]."""
    angles = positions[..., None, None] * placed.inverse
    return Turning(angles.cos(), angles.sin())


def _rotate(x: Tensor, turn: Turning) -> Tensor:
    """NeoX pairing (i, i + D / 2) of x [B, T, heads, D]."""
    low, high = x.chunk(2, -1)
    return torch.cat([low * turn.cos - high * turn.sin, high * turn.cos + low * turn.sin], -1)


def _keys_values(placed: Placed, layer: Layer, x: X, turn: Turning) -> tuple[Tensor, Tensor]:
    """x of B T rows -> k, v [B, T, K, D] float32: of the features' context, or of a block."""
    body, (batch, tokens) = placed.spec.body, turn.cos.shape[:2]
    made = placed.ops.linear(x, layer.kv).view(batch, tokens, -1, body.kv_heads, body.head_dim)
    raw = made[:, :, 0]
    k = _rotate(rms(raw, layer.vectors["self_attn.k_norm"], body.eps), turn)
    return k, rms(raw, None, body.eps) if body.gemma else made[:, :, 1]


def _attention(placed: Placed, layer: Layer, x: X, seen: Attended) -> Tensor:
    """x of B U rows, normed -> [B U, H] float32: one softmax over the cache and the block."""
    body, (batch, slots) = placed.spec.body, seen.turn.cos.shape[:2]
    q = placed.ops.linear(x, layer.q).view(batch, slots, body.heads, body.head_dim)
    q = _rotate(rms(q, layer.vectors["self_attn.q_norm"], body.eps), seen.turn) * body.scale
    own = _keys_values(placed, layer, x, seen.turn)
    k, v = (part.to(placed.dtype).transpose(1, 2) for part in own)
    grouped = q.to(placed.dtype).unflatten(2, (body.kv_heads, -1)).permute(0, 2, 3, 1, 4)
    grouped = grouped.flatten(2, 3)  # [B, K, G U, D]
    # in two parts: joined to the block's, the window would be copied once more
    scores = torch.cat([grouped @ part.transpose(2, 3) for part in (seen.held.k, k)], -1)
    scores = scores.float().unflatten(2, (-1, slots)).masked_fill(~seen.mask[:, None, None], MASKED)
    shares = scores.softmax(-1).to(placed.dtype).flatten(2, 3)
    before = seen.held.k.shape[2]
    mixed = shares[..., :before] @ seen.held.v + shares[..., before:] @ v
    mixed = mixed.unflatten(2, (-1, slots)).permute(0, 3, 1, 2, 4)
    rows = mixed.reshape(batch * slots, -1).float()
    return placed.ops.linear(fed(placed, rows), layer.o)


def fed(placed: Placed, rows: Tensor, norm: Tensor | None = None) -> X:
    """Rows [M, n] float32 as the input of a linear layer, normed by a weight [n] or as they
    are."""
    return placed.ops.norm(rows.contiguous(), Opening(norm, placed.kind))


def _mlp(placed: Placed, layer: Layer, x: X) -> Tensor:
    gated = placed.ops.gated(x, layer.gate_up, placed.kind)
    return placed.ops.linear(gated, layer.down)


def _qwen3_layer(placed: Placed, layer: Layer, h: Tensor, seen: Attended) -> Tensor:
    x, after = _opened(placed, layer, "attention", "input_layernorm", h)
    h = h + after(_attention(placed, layer, x, seen))
    x, after = _opened(placed, layer, "mlp", "post_attention_layernorm", h)
    return h + after(_mlp(placed, layer, x))


def _opened(
    placed: Placed, layer: Layer, part: str, norm: str, h: Tensor
) -> tuple[X, Callable[[Tensor], Tensor]]:
    """A sub-layer's input, and what is done with its output."""
    body, weight = placed.spec.body, layer.vectors[norm]
    if not body.conv_group:
        return fed(placed, h, weight), unchanged
    rows = rms(h, weight, body.eps).view(-1, placed.spec.slots, body.hidden)
    rows, after = convolved(layer.vectors, f"{part}_conv", body.conv_group, rows)
    return fed(placed, rows.flatten(0, 1)), after


def _gemma_layer(placed: Placed, layer: Layer, h: Tensor, seen: Attended) -> Tensor:
    w, eps = layer.vectors, placed.spec.body.eps
    mixed = _attention(placed, layer, fed(placed, h, w["input_layernorm"]), seen)
    h = h + rms(mixed, w["post_attention_layernorm"], eps)
    out = _mlp(placed, layer, fed(placed, h, w["pre_feedforward_layernorm"]))
    return (h + rms(out, w["post_feedforward_layernorm"], eps)) * w["layer_scalar"]
