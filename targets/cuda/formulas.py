"""What a Gemma 4 layer computes between its matmuls, on tensors of any leading shape.

Formulas: transformers 5.23 `models/gemma4/modeling_gemma4.py`, as in targets/jax/layers.py.
Shape legend: as in ops.py; K kv heads, G = heads / K, D head_dim, C chunks of keys, E experts, L
layers, P per-layer inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from targets.arch import Arch, LayerSpec, MoeSpec, Rope
from targets.cuda.cache import CHUNK, FP8_MAX, LANES, LayerCache

MASKED = -1e30
"""Score of an invisible key: exp underflows to exactly 0, so its value adds exactly nothing."""


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """float32 over the last axis; plain `weight`, not 1 + weight."""
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps)


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def inverse_frequencies(rope: Rope, head_dim: int, device: Any) -> Tensor:
    """[D / 2] float32: radians per position of each pair; 0 for pairs that don't rotate."""
    half = head_dim // 2
    exponent = torch.arange(half, dtype=torch.float32, device=device) * (2.0 / head_dim)
    inverse = rope.theta**-exponent / rope.factor
    inverse[rope.rotated :] = 0.0
    return inverse


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """NeoX pairing (i, i + D / 2) of x [..., D] by angles [..., D / 2]."""
    return turn(x, angles.cos(), angles.sin())


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate`, of angles whose cosines and sines are there already."""
    low, high = x.chunk(2, -1)
    left = torch.addcmul(low * cos, high, sin, value=-1)
    return torch.cat([left, torch.addcmul(high * cos, low, sin)], -1)


def soft_cap(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def rank(shares: Tensor, per_expert: Tensor, moe: MoeSpec) -> tuple[Tensor, Tensor]:
    """The best top_k of router shares [M, E], ties to the lower number; shares of these sum to 1
    before each expert's own factor."""
    numbers = shares.argsort(stable=True, dim=-1, descending=True)[:, : moe.top_k]
    top = shares.gather(-1, numbers)
    return numbers.int(), top / top.sum(-1, keepdim=True) * per_expert[numbers]


def lookup(table: Tensor, ids: Tensor, width: int) -> Tensor:
    """`scaled` rows of an embedding."""
    return scaled(table[known(ids, len(table))], width)


def known(ids: Tensor, count: int) -> Tensor:
    """As indices of so many rows; ids outside count as 0."""
    return torch.where((ids >= 0) & (ids < count), ids, 0).long()


def scaled(rows: Tensor, width: int) -> Tensor:
    """Rows of an embedding times sqrt(width), rounded to their dtype -> float32."""
    return rows.float() * torch.tensor(width**0.5, dtype=rows.dtype).item()


def mix_inputs(arch: Arch, mixed: Tensor, table: Tensor, norm: Tensor, ids: Tensor) -> Tensor:
    """Per-layer inputs [M, L * P] float32 (E2B, E4B): a table row, and a projection of h."""
    shape = (len(arch.layers), arch.per_layer_input)
    mixed = (mixed * arch.hidden**-0.5).unflatten(-1, shape)
    return (
        rms(mixed, norm, arch.eps).flatten(-2) + lookup(table, ids, arch.per_layer_input)
    ) * 2**-0.5


def query(rows: Tensor, q_norm: Tensor | None, layer: LayerSpec, eps: float) -> Tensor:
    """q [..., K, G, D] of rows of q, k, v, not turned yet."""
    raw = rows[..., : layer.heads * layer.head_dim]
    q = raw.unflatten(-1, (layer.kv_heads, -1, layer.head_dim))
    return rms(q, q_norm, eps) if layer.normed else q * layer.head_dim**-0.5


def key_and_value(
    rows: Tensor, k_norm: Tensor | None, layer: LayerSpec, eps: float
) -> tuple[Tensor, Tensor]:
    """k, not turned yet, and v [..., K, D] of rows of q, k, v. With k_eq_v the values are the raw
    keys, normed."""
    size = layer.kv_heads * layer.head_dim
    first = layer.heads * layer.head_dim
    raw = rows[..., first : first + size].unflatten(-1, (layer.kv_heads, layer.head_dim))
    value = raw if layer.k_eq_v else rows[..., first + size :].unflatten(-1, raw.shape[-2:])
    if not layer.normed:
        return raw, value
    return rms(raw, k_norm, eps), value if layer.raw_values else rms(value, None, eps)


def gate(gate_up: Tensor, silu: bool = False) -> Tensor:
    """gelu_tanh(gate) * up of [..., 2 * width], or silu(gate) * up."""
    left, right = gate_up.chunk(2, -1)
    return (F.silu(left) if silu else gelu(left)) * right


def attend(
    q: Tensor, cache: LayerCache, slot: int, position: int, window: int | None, newest: int
) -> Tensor:
    """One query q [K, G, D] over all it may see, up to position `newest` -> [K, G, D]: a partial
    per chunk of keys (best score, sum, mixed values), combined by rising position. No 1 / sqrt(D):
    q and k are normed."""
    oldest = 0 if window is None else max(0, position - window + 1)
    start, stop = oldest // CHUNK * CHUNK, (newest // CHUNK + 1) * CHUNK
    k, v = _chunks(cache, slot, start, stop)
    scores = q @ k.transpose(1, 2)
    scores[..., : oldest - start] = MASKED
    scores[..., newest + 1 - start :] = MASKED
    scores = scores.unflatten(-1, (-1, CHUNK))
    best = scores.amax(-1)  # [K, G, C]
    parts = torch.exp(scores - best[..., None])
    mixed = parts.transpose(1, 2) @ v.unflatten(1, (-1, CHUNK))  # [K, C, G, D]
    if stop - start == CHUNK:  # one partial is the whole: its share is 1
        return mixed[:, 0] / parts[..., 0, :].sum(-1)[..., None]
    share = torch.exp(best - best.amax(-1, keepdim=True))
    total, whole = torch.zeros_like(q), torch.zeros_like(share[..., 0])
    for c in range(share.shape[-1]):
        total += share[..., c, None] * mixed[:, c]
        whole += share[..., c] * parts[..., c, :].sum(-1)
    return total / whole[..., None]


def _chunks(cache: LayerCache, slot: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """k, v [K, stop - start, D] float32 of whole chunks, each of which lies in one piece."""
    firsts = [at % cache.size for at in range(start, stop, CHUNK)]
    keys, values = cache.k[slot, ..., : cache.head_dim], cache.v[slot, :, :, : cache.head_dim]
    blocks = [values[:, at // LANES : (at + CHUNK) // LANES].float() for at in firsts]
    k = torch.cat([keys[:, at : at + CHUNK].float() for at in firsts], 1)
    v = blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)
    return k, v.transpose(2, 3).reshape(k.shape)


def as_e4m3(x: Tensor, groups: int = 1) -> Tensor:
    """x [..., k] rounded to e4m3 with a scale per token and group of k: its largest size / 448.
    Groups are contiguous, of whole blocks of 32."""
    if groups > 1:
        each = -(-x.shape[-1] // (groups * 32)) * 32
        return torch.cat([as_e4m3(part) for part in x.split(each, -1)], -1)
    largest = x.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    most = torch.full_like(largest, FP8_MAX)  # divided by as a number, torch would multiply
    return (x * (most / largest)).to(torch.float8_e4m3fn).float() * (largest / most)
