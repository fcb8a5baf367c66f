"""A block drafter's forward in the words of `targets.cuda.ops`: our kernels on a Hopper GPU, plain
torch elsewhere. No shape depends on what was accepted, and nothing waits for the host, so a cycle
captures it. The mathematics, and the JAX twin: `../jax/body.py`.

The block is a call of attention of which the tokens see each other, or those before them alone: its
keys and values are written to the cache behind the text's, and what is there next overwrites them.

Shape legend: B rows, T tokens, U slots of a block, H hidden, F features, M = B U rows of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.dflash.cuda.convolution import convolved
from drafters.dflash.cuda.placing import Layer, Placed, arch_of
from targets.cuda.cache import LayerCache, make_cache, slack_of
from targets.cuda.formulas import rms
from targets.cuda.ops import NOTHING, AttentionLayer, Closing, Opening, Rows, X

PIECE = 128
"""Most rows that are written at once: what a prompt's sums take stays small."""
SLACK = slack_of(PIECE, PIECE)
"""Entries of a cache beyond what a query sees."""

Mix = Callable[[X], Tensor]
"""A layer's attention: inputs of M rows, normed -> [M, H] float32."""


def make_caches(placed: Placed, slots: int, longest: int) -> tuple[LayerCache, ...]:
    """By layer, zeros."""
    device = str(placed.weights["norm"].device)
    made = make_cache(arch_of(placed.spec), slots, longest, SLACK, placed.dtype, device)
    return tuple(cache for cache in made.layers if cache is not None)


def inject(placed: Placed, caches: tuple[LayerCache, ...], features: Tensor, rows: Rows) -> None:
    """Write the entries of features [B, T, F], those of `rows`. What a verify rejected is written
    too, behind the text: a block overwrites that before anything reads it."""
    raw = F.linear(features.to(placed.dtype), placed.weights["fc"]).float().flatten(0, 1)
    x = placed.ops.norm(raw, Opening(placed.weights["hidden_norm"], placed.kind))
    for layer, cache in zip(placed.layers, caches, strict=True):
        alone = replace(_attended(layer, cache), spec=replace(layer.spec, heads=0))
        placed.ops.store(placed.ops.linear(x, layer.kv), alone, rows)


def block(placed: Placed, caches: tuple[LayerCache, ...], h: Tensor, rows: Rows) -> Tensor:
    """The slots' states before the final norm [M, H] float32, in place of their embeddings h: each
    text's newest token, which lies where the rows start, then mask tokens."""
    closing, step = NOTHING, _step_of(placed)
    for layer, cache in zip(placed.layers, caches, strict=True):
        closing = step(placed, layer, h, closing, partial(_mixed, placed, layer, cache, rows))
    if closing is not NOTHING:
        placed.ops.norm(h, Opening(placed.weights["norm"], placed.kind), closing)
    return h


def _mixed(placed: Placed, layer: Layer, cache: LayerCache, rows: Rows, x: X) -> Tensor:
    """`Mix`."""
    ops = placed.ops
    qkv = torch.cat((ops.linear(x, layer.q), ops.linear(x, layer.kv)), 1)
    mixed = ops.attention(qkv, _attended(layer, cache), rows, layer.o.kind)
    return ops.linear(mixed, layer.o)


def normed(placed: Placed, x: Tensor) -> Tensor:
    """States [..., H] after the final norm."""
    return rms(x, placed.weights["norm"], placed.spec.body.eps)


def _attended(layer: Layer, cache: LayerCache) -> AttentionLayer:
    return AttentionLayer(layer.spec, cache, layer.q_norm, layer.vectors["self_attn.k_norm"])


def _step_of(placed: Placed) -> Callable[[Placed, Layer, Tensor, Closing, Mix], Closing]:
    """A layer: it ends the branch before it, changes h, and leaves its own last branch."""
    body = placed.spec.body
    return _gemma_layer if body.gemma else _convolved_layer if body.conv_group else _qwen3_layer


def _qwen3_layer(placed: Placed, layer: Layer, h: Tensor, closing: Closing, mix: Mix) -> Closing:
    mixed = mix(_opened(placed, layer, "input_layernorm", h, closing))
    x = _opened(placed, layer, "post_attention_layernorm", h, Closing(mixed))
    return Closing(_mlp(placed, layer, x))


def _gemma_layer(placed: Placed, layer: Layer, h: Tensor, closing: Closing, mix: Mix) -> Closing:
    w = layer.vectors
    mixed = mix(_opened(placed, layer, "input_layernorm", h, closing))
    ended = Closing(mixed, w["post_attention_layernorm"])
    x = _opened(placed, layer, "pre_feedforward_layernorm", h, ended)
    branch = _mlp(placed, layer, x)
    return Closing(branch, w["post_feedforward_layernorm"], w["layer_scalar"])


def _convolved_layer(
    placed: Placed, layer: Layer, h: Tensor, closing: Closing, mix: Mix
) -> Closing:
    """With convolutions around each sub-layer, in torch: nothing is left to be closed."""
    assert closing is NOTHING, "a layer before it closes its own"
    x, after = _convolved(placed, layer, "attention_conv", "input_layernorm", h)
    h += after(mix(x))
    x, after = _convolved(placed, layer, "mlp_conv", "post_attention_layernorm", h)
    h += after(_mlp(placed, layer, x))
    return NOTHING


def _opened(placed: Placed, layer: Layer, norm: str, h: Tensor, closing: Closing) -> X:
    return placed.ops.norm(h, Opening(layer.vectors[norm], placed.kind), closing)


def _convolved(
    placed: Placed, layer: Layer, conv: str, norm: str, h: Tensor
) -> tuple[X, Callable[[Tensor], Tensor]]:
    """A sub-layer's input, and what is done with its output."""
    body = placed.spec.body
    rows = rms(h, layer.vectors[norm], body.eps).view(-1, placed.spec.slots, body.hidden)
    rows, after = convolved(layer.vectors, conv, body.conv_group, rows)
    return placed.ops.norm(rows.flatten(0, 1).contiguous(), Opening(None, placed.kind)), after


def _mlp(placed: Placed, layer: Layer, x: X) -> Tensor:
    gated = placed.ops.gated(x, layer.gate_up, placed.kind)
    return placed.ops.linear(gated, layer.down)
