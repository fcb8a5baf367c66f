"""Pictures to soft tokens in plain torch, on a GPU or a CPU: the tower of E2B, E4B, 26B-A4B and
31B, and 12B's encoder-free form. `targets/jax/tower.py` is the same in JAX.

A picture is encoded alone and at its own size, by one sequence of the library's calls: nothing is
tuned by timing, attention's kernel is named, and no picture shares a call with another. So its rows
are a function of its pixels on one machine with one installation.

Shape legend: P patches, V values of a patch, D the encoder's width, N heads, d head_dim, S soft
tokens, H hidden size of the text model.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from specdec.core.pictures import Picture
from targets.cuda.formulas import gelu, rms
from targets.cuda.tower_graphs import TowerGraphs
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

LEVEL = torch.tensor(1 / 255, dtype=torch.float32).item()
"""A pixel of 8 bits is its level times this, in float32."""
ATTENTION = {
    ("cuda", torch.bfloat16): SDPBackend.FLASH_ATTENTION,
    ("cuda", torch.float32): SDPBackend.EFFICIENT_ATTENTION,
    ("cpu", torch.float32): SDPBackend.MATH,
}
"""The kernel that attends, by device and dtype: never torch's own choice, which may follow free
memory or its version."""


class VisionWeights(NamedTuple):
    """top: tensors outside the layers, by their names without what stands before; layers: one dict
    for each, empty for an encoder-free form."""

    top: dict[str, Tensor]
    layers: tuple[dict[str, Tensor], ...]


def vision_dtype(dtype: str) -> torch.dtype:
    """What the encoder computes in beside a text model of this dtype: its weights are wide in any
    case."""
    return torch.float32 if dtype == "float32" else torch.bfloat16


def load_vision(
    files: VisionFiles, spec: VisionSpec, dtype: torch.dtype, device: str
) -> VisionWeights:
    """Read and place. Raises UserError."""

    def place(name: str) -> Tensor:
        return torch.from_numpy(files.read(name).astype("float32")).to(device, dtype)

    prefix = EMBEDDER if spec.tower is None else TOWER
    names = [name for name in files.shapes if ".layers." not in name]
    top = {name.removeprefix(prefix): place(name) for name in names}
    every = range(0 if spec.tower is None else spec.tower.layers)
    layers = (
        {name: place(f"{TOWER}encoder.layers.{i}.{name}") for name in layer_tensors(spec)}
        for i in every
    )
    return VisionWeights(top, tuple(layers))


class PictureEncoder:
    """Encodes one picture at a time."""

    def __init__(self, spec: VisionSpec, weights: VisionWeights, eps: float) -> None:
        """eps: of the projector's norm, the text model's."""
        self.spec, self.weights, self.eps = spec, weights, eps
        projector = weights.top[PROJECTOR]
        self.device, self.dtype = projector.device, projector.dtype
        on_gpu = self.device.type == "cuda"
        self._soft = TowerGraphs(self._encode, self.device) if on_gpu else self._encode

    @torch.inference_mode()
    def encode(self, picture: Picture) -> Tensor:
        """-> soft tokens [S, H] in the weights' dtype."""
        levels = torch.from_numpy(picture.levels).to(self.device)
        return self._soft(levels, torch.from_numpy(picture.positions).to(self.device).long())

    def _encode(self, levels: Tensor, positions: Tensor) -> Tensor:
        pixels = levels.float() * LEVEL
        if self.spec.tower is None:
            rows = self._embedded(pixels, positions)
        else:
            rows = self._pooled(self._through_layers(self.spec.tower, pixels, positions))
        rows = rms(rows, None, self.eps).to(self.dtype)
        return F.linear(rows, self.weights.top[PROJECTOR])

    def _embedded(self, pixels: Tensor, positions: Tensor) -> Tensor:
        """12B: a patch is a row [P, D]."""
        top, (x, y) = self.weights.top, positions.T
        h = self._layer_norm(pixels.to(self.dtype), "patch_ln1")
        h = F.linear(h, top["patch_dense.weight"]) + top["patch_dense.bias"]
        h = self._layer_norm(h, "patch_ln2")
        table = top["pos_embedding"]
        return self._layer_norm(h + (table[x, 0] + table[y, 1]), "pos_norm")

    def _layer_norm(self, x: Tensor, name: str) -> Tensor:
        parts = (self.weights.top[f"{name}.{part}"] for part in ("weight", "bias"))
        weight, bias = (part.float() for part in parts)
        wide = F.layer_norm(x.float(), x.shape[-1:], weight, bias, LAYER_NORM_EPS)
        return wide.to(self.dtype)

    def _through_layers(self, tower: TowerSpec, pixels: Tensor, positions: Tensor) -> Tensor:
        """[P, D]."""
        top, (x, y) = self.weights.top, positions.T
        h = F.linear((2 * (pixels - 0.5)).to(self.dtype), top[PATCHES])
        h = h + (top[TABLE][0, x] + top[TABLE][1, y])
        tables = _rope_tables(tower, positions, self.dtype)
        for w in self.weights.layers:
            h = self._layer(tower, w, h, tables)
        return h

    def _pooled(self, h: Tensor) -> Tensor:
        """[P, D] -> [S, D]; means and the factor in float32."""
        top, width = self.weights.top, self.spec.width
        cells = h.float().view(-1, self.spec.patches.pool**2, width)
        rows = cells.mean(1).to(self.dtype).float() * math.sqrt(width)
        if STD_BIAS in top:
            rows = (rows - top[STD_BIAS].float()) * top[STD_SCALE].float()
        return rows.to(self.dtype)

    def _layer(
        self, tower: TowerSpec, w: dict[str, Tensor], h: Tensor, tables: tuple[Tensor, Tensor]
    ) -> Tensor:
        heads = (len(h), tower.heads, tower.head_dim)
        x = self._rms(h, w["input_layernorm.weight"])
        q, k, v = (_linear(x, w, f"self_attn.{part}_proj").view(heads) for part in "qkv")
        q = _rotate(self._rms(q, w["self_attn.q_norm.weight"]), tables)
        k = _rotate(self._rms(k, w["self_attn.k_norm.weight"]), tables)
        mixed = _linear(_attend(q, k, self._rms(v, None)), w, "self_attn.o_proj")
        h = h + self._rms(mixed, w["post_attention_layernorm.weight"])
        x = self._rms(h, w["pre_feedforward_layernorm.weight"])
        gate = gelu(_linear(x, w, "mlp.gate_proj"))
        x = _linear(gate * _linear(x, w, "mlp.up_proj"), w, "mlp.down_proj")
        return h + self._rms(x, w["post_feedforward_layernorm.weight"])

    def _rms(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, self.spec.eps)  # float32 within, rounded once


def _linear(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    """A linear layer; inputs and outputs are clamped where it has bounds."""
    weight = w[f"{name}.linear.weight"]
    if f"{name}.input_min" not in w:
        return F.linear(x, weight)
    x = torch.clamp(x, w[f"{name}.input_min"], w[f"{name}.input_max"])
    return torch.clamp(F.linear(x, weight), w[f"{name}.output_min"], w[f"{name}.output_max"])


def _rope_tables(tower: TowerSpec, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [P, 1, 2, d / 2] of positions [P, 2]: the head's first half turns by x, its
    second by y."""
    half = tower.head_dim // 2
    exponent = torch.arange(half // 2, dtype=torch.float32, device=positions.device) * (2.0 / half)
    inverse = tower.theta**-exponent
    angles = positions[:, None, :, None].float() * torch.cat([inverse, inverse])
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """x [P, N, d]: in each half of a head, pairs (j, j + d / 4) turn."""
    cos, sin = tables
    halves = x.unflatten(-1, (2, -1))
    low, high = halves.chunk(2, -1)
    return (halves * cos + torch.cat([-high, low], -1) * sin).flatten(-2)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k, v [P, N, d] -> [P, N * d]. No 1 / sqrt(d): q and k are normed."""
    kind = ATTENTION[q.device.type, q.dtype]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    with sdpa_kernel([kind]):
        out = F.scaled_dot_product_attention(q, k, v, scale=1.0)
    return out[0].transpose(0, 1).flatten(1)
