"""Read tensors by name, from the file to the device, in the form that the forward needs.

dtype "fp8": every quantisable linear as e4m3 per output channel, taken from an FP8 file as it is
or quantised on load, and the rest bf16. "fp8-w8a8": the same weights, of kind "w8a8" except
experts: these keep 16-bit inputs, because each has few rows. "bfloat16" and "float32":
everything wide. "int4": 4 bits where the file has them, in a form that the kernels take, integers
or NVFP4 (four_bits.py), FP8 per channel as it is beside them, and the rest bf16; of a file without
any, every quantisable linear rounded on load. For the other dtypes files of 4 bits, int8 or FP8 in
blocks are dequantised first: fp8 rounds their values again.
Per-layer inputs (E2B, E4B) stay wide in any case: they are small, and the kernels read them so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from targets.checkpoint import FOUR_BITS, Checkpoint
from targets.cuda import four_bits, int4
from targets.cuda.cache import FP8_MAX
from targets.cuda.four_bits import FourBits
from targets.cuda.ops import Linear, NarrowHead, Ops
from targets.cuda.staging import Staging
from targets.tensors import TensorSpec

QUANTISED = ("fp8", "fp8-w8a8", "int4")
"""Dtypes of narrow weights."""
DTYPES = ("float32", "bfloat16", *QUANTISED)

Plain = tuple[Tensor, Tensor | None]
Raw = Plain | FourBits
"""A tensor as stored and its scale (None where it is wide), or its 4 bits, on the device."""
Source = Callable[[str], Raw]
Part = TypeVar("Part", Plain, FourBits)


class Cut(Protocol):
    def __call__(self, name: str, raw: Part, /) -> Part:
        """A card's part of a tensor of this name, in the form that its weight is packed from."""
        ...


def whole(name: str, raw: Part) -> Part:
    """The `Cut` of a card that has all."""
    return raw


def quantise_fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 per output channel [..., out, in]: scale [..., out] = absmax / 448."""
    values = values.float()
    scale = values.abs().amax(-1).clamp(min=1e-12) / FP8_MAX
    return (values / scale[..., None]).to(torch.float8_e4m3fn), scale


def own_dtypes(checkpoint: Checkpoint, dtype: str) -> dict[str, str]:
    """The dtypes of weights that a file of 4 bits stores in other forms, by name."""
    if dtype != "int4" or not checkpoint.has_four_bits:
        return {}
    narrow = [name for name, spec in checkpoint.specs.items() if quantised(name, spec)]
    held = {name: checkpoint.stored_as(name) for name in narrow}
    others = {name: kind for name, kind in held.items() if kind not in FOUR_BITS}
    return {name: "fp8" if kind == "F8_E4M3" else "bfloat16" for name, kind in others.items()}


def quantised(name: str, spec: TensorSpec) -> bool:
    """Whether a narrow dtype narrows this tensor: per-layer inputs stay wide."""
    return spec.linear and "per_layer" not in name


class Reader:
    """Reads one checkpoint, or another `source`; weights with one input are packed as one."""

    def __init__(
        self,
        source: Source,
        specs: dict[str, TensorSpec],
        dtype: str,
        ops: Ops,
        staging: Staging,
        rounds: bool = True,
        cut: Cut = whole,
    ) -> None:
        """rounds: whether dtype int4 rounds wider weights too."""
        self.cut = cut
        self.source, self.specs, self.ops = source, specs, ops
        self.staging, self.rounds = staging, rounds
        self.wide = wide_dtype(dtype)
        self.wide_kind = "float32" if dtype == "float32" else "bf16"
        self.dtype = dtype

    def vector(self, name: str) -> Tensor:
        return self._wide(name).float()

    def table(self, name: str) -> Tensor:
        return self._wide(name)

    def numbers(self, name: str) -> Tensor:
        """int64, of a tensor of integers."""
        raw = self.source(name)
        assert not isinstance(raw, FourBits), name
        return raw[0].long()

    def linear(self, names: list[str], layout: str = "plain") -> Linear:
        """Several weights with one input, below each other. What is not quantisable stays wide."""
        with self.staging.aside():
            packed = self._packed(names, layout)
        return self.staging.settled(packed)

    def heads(self, name: str) -> tuple[Linear, NarrowHead | None]:
        """The table as the head, and its codes for certified choices (certified.py)."""
        with self.staging.aside():
            values = self._wide(name)
            if self.wide_kind == "bf16":
                head, narrow = self.ops.heads(values)
            else:
                head, narrow = self.ops.pack(values, None, self.wide_kind, "plain"), None
        settled = self.staging.settled(head)
        return settled, narrow and NarrowHead.of(settled, narrow.error.clone())

    def _packed(self, names: list[str], layout: str) -> Linear:
        raw = [self.source(name) for name in names]
        narrows = all(quantised(name, self.specs[name]) for name in names)
        if narrows and self.dtype == "int4":
            narrow = [self._four_bits(each) for each in raw]
            there = [
                self.cut(name, part)
                for name, part in zip(names, narrow, strict=True)
                if part is not None
            ]
            joined = four_bits.joined(there) if len(there) == len(raw) else None
            if joined is not None:
                return self.ops.pack_codes(joined, layout)
            narrows = all(map(_is_fp8, raw))
        if narrows and self.dtype in QUANTISED:
            parts = [self.cut(name, _fp8(each)) for name, each in zip(names, raw, strict=True)]
            values, scales = zip(*parts, strict=True)
            w8a8 = self.dtype == "fp8-w8a8" and not layout.startswith("experts")
            kind = "w8a8" if w8a8 else "fp8"
            return self.ops.pack(_joined(values), _joined(scales), kind, layout)
        wide = [(_widened(each).to(self.wide), None) for each in raw]
        parts = [self.cut(name, each) for name, each in zip(names, wide, strict=True)]
        return self.ops.pack(_joined([part[0] for part in parts]), None, self.wide_kind, layout)

    def _four_bits(self, raw: Raw) -> FourBits | None:
        if isinstance(raw, FourBits):
            return raw
        return int4.quantise(_widened(raw)) if self.rounds else None

    def _wide(self, name: str) -> Tensor:
        return _widened(self.source(name)).to(self.wide)


def _is_fp8(raw: Raw) -> bool:
    return not isinstance(raw, FourBits) and raw[0].dtype == torch.float8_e4m3fn


def _fp8(raw: Raw) -> tuple[Tensor, Tensor]:
    if not isinstance(raw, FourBits) and _is_fp8(raw):
        assert raw[1] is not None
        return raw[0], raw[1]
    return quantise_fp8(_widened(raw))


def wide_dtype(dtype: str) -> torch.dtype:
    """The dtype of tensors that are not quantised."""
    return torch.float32 if dtype == "float32" else torch.bfloat16


def _joined(parts: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _widened(raw: Raw) -> Tensor:
    if isinstance(raw, FourBits):
        return raw.values().float() * raw.row[..., None]
    values, scale = raw
    return values if scale is None else values.float() * scale[..., None]
