"""Which tensors of a file hold one weight, found by the names beside it; never by an ignore list,
because those of third-party files contradict their tensors.

Read besides wide weights, W the name without `.weight` of a weight [out, in]:

    per channel       W.weight e4m3 or int8, W.weight_scale [out, 1]
    FP8 in blocks     W.weight e4m3, W.weight_scale (or _inv) [out / 128, in / 128], rounded up
    int4              W.weight_packed int32 [out, in / 8], W.weight_scale [out, groups], of one
                      group too; W.weight_zero_point int32 [out / 8, groups] where asymmetric
    NVFP4             W.weight_packed bytes [out, in / 2], W.weight_scale e4m3 [out, in / 16], and
                      what those are divided by, W.weight_global_scale
    NVFP4, ModelOpt   W.weight bytes, W.weight_scale, multiplied by W.weight_scale_2

The first four are compressed-tensors' (0.20). Only weights are read: tensors that
describe how inputs were to be rounded are not used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np

from specdec.core.errors import UserError
from targets.stored import Groups, Stored

READ = "int4 and NVFP4 packed, FP8 and int8 per channel, FP8 in blocks of 128 x 128"
WIDE = ("BF16", "F16", "F32")
"""safetensors' names of the dtypes of unquantised weights."""
BLOCK = 128
NVFP4_GROUP = 16
UNREAD = {
    "bitsandbytes": r"\.quant_state\.bitsandbytes|\.weight\.absmax$|\.SCB$",
    "MLX": r"\.scales$",
    "GPTQ or AWQ": r"\.qweight$",
    "a packed embedding": r"\.embed_tokens(_per_layer)?\.weight_packed$",
}
"""Schemes that are not read, by names of tensors that only they have."""
BITS = (4, 8)
"""Widths of integers that are read."""
UNUSED = ("input_scale", "input_global_scale", "weight_shape", "k_scale", "v_scale")
"""What may stand beside a weight and is not needed for its values."""
PER_WORD = 8
"""Nibbles of an int32, the lowest first."""


class Tensors(Protocol):
    """One file's tensors."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str: ...

    def read(self, name: str) -> np.ndarray: ...


@dataclass(frozen=True)
class Weight:
    """One weight [out, in] of a checkpoint: `base` is its name without `.weight`."""

    path: Path
    """The checkpoint's, for error messages."""
    files: Mapping[str, Tensors]
    base: str
    shape: tuple[int, ...]
    config: Mapping[str, Any]
    """`quantization_config` of config.json; empty where there is none."""

    @property
    def names(self) -> set[str]:
        """The tensors that hold it; raises KeyError, with the one that a file lacks."""
        codes = self._codes
        beside = {f"{self.base}.{name}" for name in (*UNUSED, *self._beside(codes))}
        return {codes} | (beside & self.files.keys())

    def check(self) -> None:
        """By the headers. Raises UserError."""
        codes, inner = self._codes, self.shape[-1]
        kind = self.files[codes].dtype(codes)
        if kind == "I32":
            self._expect(codes, (*self.shape[:-1], -(-inner // PER_WORD)), "of 4 bits")
            self._check_groups(self._groups(), None)
        elif kind == "U8":
            self._expect(codes, (*self.shape[:-1], inner // 2))
            self._check_groups(self._groups(), NVFP4_GROUP)
            self._check_nvfp4_scales()
        else:
            self._expect(codes, self.shape)
            if kind in ("F8_E4M3", "I8"):
                self._check_plain_scale(kind)
            elif kind not in WIDE:
                self._refuse(f"{codes} is {kind}, which specdec can't read; it reads {READ}")

    def read(self) -> Stored:
        """Raises UserError."""
        codes = self._codes
        kind, values = self.files[codes].dtype(codes), self._tensor(codes)
        if kind == "I32":
            return self._read_int4(values.view(np.uint8))
        if kind == "U8":
            return self._read_nvfp4(values)
        if kind not in ("F8_E4M3", "I8"):
            return Stored(values)
        scale = self._tensor(self._scale).astype(np.float32)
        if not self._in_blocks(kind):
            return Stored(values, scale.reshape(self.shape[:-1]))
        rows = np.repeat(scale, BLOCK, 0)[: self.shape[0]]
        return Stored(values, None, Groups(rows, BLOCK))

    def _in_blocks(self, kind: str) -> bool:
        """Whether each block of FP8 has a scale. Their number says nothing: an output projection of
        31B, [5376, 16384], has as many blocks as output channels."""
        blocks = (-(-self.shape[0] // BLOCK), -(-self.shape[-1] // BLOCK))
        return kind == "F8_E4M3" and self._groups() == blocks != (self.shape[0], 1)

    @property
    def _codes(self) -> str:
        packed = f"{self.base}.weight_packed"
        return packed if packed in self.files else f"{self.base}.weight"

    @property
    def _scale(self) -> str:
        inverse = f"{self.base}.weight_scale_inv"
        return inverse if inverse in self.files else f"{self.base}.weight_scale"

    @property
    def _over(self) -> str:
        """The name of the scale of an NVFP4 weight's scales."""
        packed = self._codes.endswith("_packed")
        return f"{self.base}.{'weight_global_scale' if packed else 'weight_scale_2'}"

    def _beside(self, codes: str) -> tuple[str, ...]:
        """Last names of what its values need."""
        kind = self.files[codes].dtype(codes)
        scale = self._scale.removeprefix(f"{self.base}.")
        if kind == "I32":
            return scale, "weight_zero_point", "weight_g_idx"
        if kind == "U8":
            return scale, self._over.removeprefix(f"{self.base}.")
        return (scale,) if kind in ("F8_E4M3", "I8") else ()

    def _read_int4(self, values: np.ndarray) -> Stored:
        scale, inner = self._tensor(self._scale), self.shape[-1]
        values = values[:, : inner // 2]
        zero = self._zero(scale.shape)
        if zero is None and scale.shape[1] == 1:
            return Stored(values, scale[:, 0].astype(np.float32), code="int4")
        self._check_order(inner // scale.shape[1])
        return Stored(values, None, Groups(scale, inner // scale.shape[1], zero), "int4")

    def _zero(self, shape: tuple[int, ...]) -> np.ndarray | None:
        name = f"{self.base}.weight_zero_point"
        if name not in self.files:
            return None
        packed = np.ascontiguousarray(self._tensor(name).T).view(np.uint8)  # along out
        nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(shape[1], -1)
        return nibbles.T[: shape[0]].astype(np.int8) - np.int8(8)

    def _check_order(self, size: int) -> None:
        name = f"{self.base}.weight_g_idx"
        if name not in self.files:
            return
        order = self._tensor(name)
        if (order >= 0).all() and (order != np.arange(self.shape[-1]) // size).any():
            self._refuse(
                f"{name}: inputs are ordered by activation, which specdec does not read: quantise "
                "it with actorder weight (static), or none"
            )

    def _read_nvfp4(self, values: np.ndarray) -> Stored:
        over = self._one(self._over)
        factor = 1 / over if self._codes.endswith("_packed") else over
        channels = np.full(self.shape[:-1], factor, np.float32)
        return Stored(values, channels, Groups(self._tensor(self._scale), NVFP4_GROUP), "e2m1")

    def _check_nvfp4_scales(self) -> None:
        kind = self.files[self._scale].dtype(self._scale)
        if kind != "F8_E4M3":
            self._refuse(f"{self._scale} is {kind}: the scales of NVFP4 are F8_E4M3")
        over = self._one(self._over)
        if not (np.isfinite(over) and over > 0):
            self._refuse(f"{self._over} is {over}: a positive number is expected")

    def _one(self, name: str) -> np.float32:
        values = self._tensor(name)
        if values.size != 1:
            self._refuse(f"{name} has shape {list(values.shape)}: one number is expected")
        return np.float32(values.reshape(()))

    def _tensor(self, name: str) -> np.ndarray:
        if name not in self.files:
            self._refuse(f"{self.base}.weight is quantised but {name} is missing")
        return self.files[name].read(name)

    def _expect(self, name: str, shape: tuple[int, ...], what: str = "") -> None:
        found = self.files[name].shape(name)
        if found != shape:
            self._refuse(
                f"{name} has shape {list(found)}, config.json needs {list(shape)}"
                f"{what and f' ({what}, no other width is read)'}: config and weights are of "
                "different models"
            )

    def _groups(self) -> tuple[int, ...]:
        """The shape of the scales of packed weights."""
        if self._scale not in self.files:
            self._refuse(f"{self.base}.weight is quantised but {self._scale} is missing")
        return self.files[self._scale].shape(self._scale)

    def _check_groups(self, shape: tuple[int, ...], size: int | None) -> None:
        """size: inputs per group; None: the config's, if it has one."""
        out, inner = self.shape
        if inner % 2 or len(shape) != 2 or shape[0] != out or not shape[1] or inner % shape[1]:
            self._refuse(
                f"{self._scale} has shape {list(shape)}: of a weight {list(self.shape)} it needs "
                f"[{out}, groups], groups of equally many inputs"
            )
        found = inner // shape[1]
        expected = {size} if size else _group_sizes(self.config)
        if shape[1] > 1 and expected and found not in expected:
            self._refuse(
                f"{self._scale} has shape {list(shape)}: groups of {found} inputs, where "
                f"{' or '.join(map(str, sorted(expected)))} are expected"
            )
        if size is None and _asymmetric(self.config):
            zero = f"{self.base}.weight_zero_point"
            if zero not in self.files:
                self._refuse(f"{self.base}.weight is asymmetric but {zero} is missing")
            self._expect(zero, (-(-out // PER_WORD), shape[1]))

    def _check_plain_scale(self, kind: str) -> None:
        shape = self._groups()
        if int(np.prod(shape)) != self.shape[0] and not self._in_blocks(kind):
            self._refuse(
                f"the scale of {self.base}.weight has shape {list(shape)}: only one scale per "
                f"output channel ({self.shape[0]} of them), or FP8's per block of {BLOCK} x "
                f"{BLOCK}, is supported"
            )

    def _refuse(self, what: str) -> NoReturn:
        scheme = named(self.config)
        form = f" (quantised as {scheme})" if scheme else ""
        raise UserError(f"{self.path}{form}: {what}")


def refuse_unread(path: Path, names: Iterable[str], config: Mapping[str, Any]) -> None:
    """Raise UserError, with the scheme's name, for a checkpoint in a form that is not read."""
    found = next(
        (scheme for scheme, own in UNREAD.items() if any(re.search(own, name) for name in names)),
        None,
    )
    widths = {w["num_bits"] for w in _weights_of(config) if isinstance(w.get("num_bits"), int)}
    widths -= {*BITS}
    if widths:
        found = f"{named(config)} with {' and '.join(map(str, sorted(widths)))} bits"
    if config.get("quant_method") == "bitsandbytes":
        found = "bitsandbytes"
    if found is not None:
        raise UserError(
            f"{path} is quantised as {found}, which specdec does not read; it reads {READ}: choose "
            "another repository of this model, or the unquantised one with --dtype int4 or fp8"
        )


def named(config: Mapping[str, Any]) -> str | None:
    """What a checkpoint's config calls its quantisation; None: it has none."""
    method = config.get("quant_method") or config.get("quant_algo")
    form = config.get("format")
    return f"{method} ({form})" if method and form else method or form


def _weights_of(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = config.get("config_groups")
    found = [g.get("weights") for g in groups.values()] if isinstance(groups, Mapping) else []
    return [weights for weights in found if isinstance(weights, Mapping)]


def _group_sizes(config: Mapping[str, Any]) -> set[int]:
    sizes = {weights.get("group_size") for weights in _weights_of(config)}
    return {size for size in sizes if isinstance(size, int) and size > 0}


def _asymmetric(config: Mapping[str, Any]) -> bool:
    """Whether all its weights are."""
    weights = _weights_of(config)
    return bool(weights) and all(w.get("symmetric") is False for w in weights)
