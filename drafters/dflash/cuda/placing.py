"""A block drafter's weights on a device: linear layers as the target's operations read them (fp8
beside narrow targets, quantised on load), tables and vectors as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafters.dflash.spec import BlockSpec
from specdec.core.errors import UserError
from targets.arch import Arch, LayerSpec
from targets.cuda.attention import HEADS
from targets.cuda.cache import padded_head
from targets.cuda.kernels import Kernels
from targets.cuda.load import WIDEST
from targets.cuda.ops import Linear, Ops
from targets.cuda.reader import quantise_fp8
from targets.cuda.reference import Reference
from targets.cuda.staging import Staging
from targets.cuda.upload import as_tensor, upload

KINDS = {"bfloat16": "bf16", "float32": "float32"}
"""Kind of the linear layers by the target's dtype; fp8 beside narrower ones."""
VECTOR = 1
"""Dimensions of weights that stay float32; convolutions' base kernels do too."""


@dataclass(frozen=True)
class Layer:
    """One layer's weights. kv: keys' rows, then values', where these have rows of their own.
    q_norm: with the factor of scores in it. vectors: other norms and convolutions, by their last
    names."""

    spec: LayerSpec
    q: Linear
    kv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    q_norm: Tensor
    vectors: dict[str, Tensor]


@dataclass(frozen=True)
class Placed:
    """A head's weights on a device."""

    spec: BlockSpec
    ops: Ops
    kind: str
    """Of the linear layers."""
    dtype: torch.dtype
    """Of tables, keys and values."""
    layers: tuple[Layer, ...]
    weights: dict[str, Tensor]
    """What is not a layer's: `fc`, tables, norms, the chooser's."""
    lm_head: Linear | None


def arch_of(spec: BlockSpec) -> Arch:
    """The head as the operations see it."""
    body = spec.body
    layers = tuple(
        LayerSpec(
            window=layer.window,
            heads=body.heads,
            kv_heads=body.kv_heads,
            head_dim=body.head_dim,
            rope=body.rope,
            k_eq_v=body.gemma,
            kv_from=None,
            ffw=body.ffw,
            moe=None,
            raw_values=not body.gemma,
            both_ways=not layer.causal,
        )
        for layer in body.layers
    )
    sizes = spec.draft_vocab, body.hidden, layers, body.eps, None, 0, 0, spec.max_position
    return Arch(*sizes, silu=not body.gemma)


def ops_of(spec: BlockSpec, target_ops: Ops, positions: int, kind: str) -> Ops:
    """Kernels where the target has them, else references. Raises UserError for a head that the
    kernels don't take."""
    arch, body = arch_of(spec), spec.body
    if isinstance(target_ops, Reference):
        return Reference(arch)
    if body.hidden > WIDEST or body.head_dim % 8 or padded_head(body.head_dim) not in HEADS:
        raise UserError(
            f"the kernels take block drafters of width up to {WIDEST} with attention heads padded "
            f"to 64, 128, 256 or 512, not {body.hidden} with {body.head_dim}: use --backend jax"
        )
    return Kernels(arch, positions, torch.bfloat16, {kind, "bf16"})


def place(
    spec: BlockSpec, weights: dict[str, np.ndarray], ops: Ops, kind: str, device: torch.device
) -> Placed:
    """weights: by the names of `drafters.dflash.spec.tensors`; those of `spec`."""
    dtype, staging = torch.float32 if kind == "float32" else torch.bfloat16, Staging(str(device))
    packing = _Packing(weights, ops, kind, device)

    def linear(*names: str, layout: str = "plain") -> Linear:
        with staging.aside():
            packed = packing.packed(names, layout)
        return staging.settled(packed)

    def layer(number: int, own: LayerSpec) -> Layer:
        prefix = f"layers.{number}."
        attention = f"{prefix}self_attn."
        values = () if spec.body.gemma else (f"{attention}v_proj",)
        return Layer(
            spec=own,
            q=linear(f"{attention}q_proj"),
            kv=linear(f"{attention}k_proj", *values),
            o=linear(f"{attention}o_proj", layout="row_parallel"),
            gate_up=linear(f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj", layout="gated"),
            down=linear(f"{prefix}mlp.down_proj", layout="row_parallel"),
            q_norm=packing.tensor(f"{attention}q_norm", dtype) * spec.body.scale,
            vectors={
                name.removeprefix(prefix): packing.tensor(name, dtype)
                for name in weights
                if name.startswith(prefix) and not name.endswith(("_proj", "q_norm"))
            },
        )

    rest = [n for n in weights if not n.startswith("layers.") and n != "lm_head"]
    return Placed(
        spec=spec,
        ops=ops,
        kind=kind,
        dtype=dtype,
        layers=tuple(layer(*pair) for pair in enumerate(arch_of(spec).layers)),
        weights={name: packing.tensor(name, dtype) for name in rest},
        lm_head=linear("lm_head") if spec.own_head else None,
    )


@dataclass(frozen=True)
class _Packing:
    weights: dict[str, np.ndarray]
    ops: Ops
    kind: str
    device: torch.device

    def packed(self, names: tuple[str, ...], layout: str) -> Linear:
        values = torch.cat([self._uploaded(name) for name in names])
        if self.kind == "fp8":
            return self.ops.pack(*quantise_fp8(values), self.kind, layout)
        wide = values.bfloat16() if self.kind == "bf16" else values.float()
        return self.ops.pack(wide, None, self.kind, layout)

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        narrow = self.weights[name].ndim > VECTOR and not name.endswith("base_kernel")
        return self._uploaded(name).to(dtype if narrow else torch.float32)

    def _uploaded(self, name: str) -> Tensor:
        values = np.ascontiguousarray(self.weights[name])
        return upload(as_tensor(values), str(self.device))
