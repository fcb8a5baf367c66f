"""The residual stream's norms as launches of `kernels/norm.cu`: a part of `Kernels`."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_void_p
from typing import Any

import torch
from torch import Tensor

from targets.cuda.inputs import Input, make_input, make_narrow_input
from targets.cuda.launch import Launcher, address, pointer
from targets.cuda.ops import NOTHING, Closing, Opening
from targets.cuda.variants import norm_variant
from targets.cuda.w8a8 import Parts, as_groups

ROW_THREADS = 512
"""Of a CTA that has a row of the residual stream."""


class _AddNorm(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("h", "post", "scalar", "pre", "x", "scale")),
        *((name, c_int) for name in ("hidden", "k_blocks", "block")),
        ("eps", c_float),
    )


class _Join(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("first_weight", "second", "second_weight", "out")),
        ("hidden", c_int),
        ("eps", c_float),
    )


class Norms:
    def __init__(self, launch: Launcher, eps: float) -> None:
        self._launch, self._eps = launch, eps

    def norm(self, h: Tensor, opening: Opening, closing: Closing = NOTHING) -> Input:
        """`Ops.norm`."""
        m, hidden = h.shape
        x = (make_narrow_input if opening.kind == "w8a8" else make_input)(m, hidden, h.device)
        pointers = map(address, (h, closing.post, closing.scalar, opening.pre, x.data, x.scale))
        job = _AddNorm(*pointers, hidden, x.k_blocks, x.block, self._eps)
        self._launch_over(m, opening.kind, "add_norm", job, closing.branch)
        return x

    def join(
        self, dense: Tensor | Parts, dense_norm: Tensor, routed: Tensor, routed_norm: Tensor
    ) -> Tensor:
        """`Ops.join`."""
        m, hidden = dense.shape
        out = torch.empty((m, hidden), device=routed.device)
        job = _Join(*map(address, (dense_norm, routed, routed_norm, out)), hidden, self._eps)
        self._launch_over(m, "bf16", "join", job, dense)
        return out

    def _launch_over(
        self, rows: int, kind: str, name: str, job: Structure, branch: Tensor | Parts | None
    ) -> None:
        arguments: list[Any]
        if isinstance(branch, Parts):
            name, arguments = f"{name}_groups", [job, as_groups(branch)]
        else:
            arguments = [job, pointer(branch)]
        self._launch(norm_variant(kind), name, (rows, 1, 1), ROW_THREADS, arguments)
