"""What a Gemma 4 layer computes between its matmuls, on tensors of any leading shape.

Formulas: transformers 5.23 `models/gemma4/modeling_gemma4.py`, as in targets/jax/layers.py.
Shape legend: as in ops.py; K kv heads, D head_dim, E experts, L layers, P per-layer inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from targets.arch import Arch, LayerSpec, MoeSpec, Rope
from targets.cuda.cache import FP8_MAX


def rms(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """float32 over the last axis; plain `weight`, not 1 + weight."""
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps)


def gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def inverse_frequencies(rope: Rope, head_dim: int, device: Any) -> torch.Tensor:
    """[D / 2] float32: radians per position of each pair; 0 for pairs that don't rotate."""
    half = head_dim // 2
    exponent = torch.arange(half, dtype=torch.float32, device=device) * (2.0 / head_dim)
    inverse = rope.theta**-exponent / rope.factor
    inverse[rope.rotated :] = 0.0
    return inverse


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """NeoX pairing (i, i + D / 2) of x [..., D] by angles [..., D / 2]."""
    cos, sin = angles.cos(), angles.sin()
    low, high = x.chunk(2, -1)
    left = torch.addcmul(low * cos, high, sin, value=-1)
    return torch.cat([left, torch.addcmul(high * cos, low, sin)], -1)


def soft_cap(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def rank(
    shares: torch.Tensor, per_expert: torch.Tensor, moe: MoeSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best top_k of router shares [M, E], ties to the lower number; shares of these sum to 1
    before each expert's own factor."""
    numbers = shares.argsort(stable=True, dim=-1, descending=True)[:, : moe.top_k]
    top = shares.gather(-1, numbers)
    return numbers.int(), top / top.sum(-1, keepdim=True) * per_expert[numbers]


def lookup(table: torch.Tensor, ids: torch.Tensor, width: int) -> torch.Tensor:
    """Rows of an embedding times sqrt(width), rounded to the table's dtype -> float32."""
    known = torch.where((ids >= 0) & (ids < len(table)), ids, 0)
    factor = torch.tensor(width**0.5, dtype=table.dtype).item()
    return table[known.long()].float() * factor


def mix_inputs(
    arch: Arch, mixed: torch.Tensor, table: torch.Tensor, norm: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Per-layer inputs [M, L * P] float32 (E2B, E4B): a table row, and a projection of h."""
    shape = (len(arch.layers), arch.per_layer_input)
    mixed = (mixed * arch.hidden**-0.5).unflatten(-1, shape)
    return (
        rms(mixed, norm, arch.eps).flatten(-2) + lookup(table, ids, arch.per_layer_input)
    ) * 2**-0.5


def new_entry(
    row: torch.Tensor, k_norm: torch.Tensor, layer: LayerSpec, angles: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """k, v [..., K, D] from a row of q, k, v. With k_eq_v the values are the raw keys, normed."""
    size = layer.kv_heads * layer.head_dim
    first = layer.heads * layer.head_dim
    raw = row[..., first : first + size].unflatten(-1, (layer.kv_heads, layer.head_dim))
    value = raw if layer.k_eq_v else row[..., first + size :].unflatten(-1, raw.shape[-2:])
    return rotate(rms(raw, k_norm, eps), angles), rms(value, None, eps)


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu_tanh(gate) * up of [..., 2 * width]."""
    left, right = gate_up.chunk(2, -1)
    return gelu(left) * right


def as_e4m3(x: torch.Tensor) -> torch.Tensor:
    """x [..., k] rounded to e4m3 with a scale per token: its largest magnitude / 448."""
    largest = x.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    most = torch.full_like(largest, FP8_MAX)  # divided by as a number, torch would multiply
    return (x * (most / largest)).to(torch.float8_e4m3fn).float() * (largest / most)
