"""What a weight is stored as, wide or narrow, and what it means.

A weight's value is (code - zero) * group scale * channel scale, of which a scheme has some: int8
and e4m3 per channel have a channel scale alone, 4-bit weights a scale for each group of inputs,
NVFP4 both. Formats: `targets/schemes.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

NIBBLES: dict[str, np.ndarray] = {
    "int4": np.arange(-8, 8).astype(ml_dtypes.int4),
    "e2m1": np.array(
        [sign * v for sign in (1, -1) for v in (0.0, 0.5, 1, 1.5, 2, 3, 4, 6)],
        ml_dtypes.float4_e2m1fn,
    ),
}
"""What each of 16 nibbles stands for, by code: integers offset by 8, and NVFP4's floats."""


@dataclass(frozen=True)
class Groups:
    """scale [..., out, groups] in the dtype of the file, of every `size` inputs (the last group may
    have fewer); zero, alike, int8: the code that stands for 0; None: 0 does."""

    scale: np.ndarray
    size: int
    zero: np.ndarray | None = None


@dataclass(frozen=True)
class Stored:
    """values [..., out, in], or of a code of `NIBBLES` bytes [..., out, in / 2], two values each,
    the low one first. scale [..., out] float32, of output channels. Wide values have neither scale
    nor groups."""

    values: np.ndarray
    scale: np.ndarray | None = None
    groups: Groups | None = None
    code: str | None = None

    @property
    def wide(self) -> bool:
        return self.scale is None and self.groups is None

    @property
    def form(self) -> tuple[object, ...]:
        """What weights that lie in one array have in common."""
        groups = self.groups and (self.groups.size, self.groups.scale.dtype)
        zero = self.groups is not None and self.groups.zero is not None
        return self.values.dtype, self.code, self.scale is None, groups, zero


def unpacked(stored: Stored) -> np.ndarray:
    """Its codes [..., out, in], one value each, in the narrowest dtype that has them."""
    if stored.code is None:
        return stored.values
    bytes_ = np.arange(256)
    pairs = NIBBLES[stored.code][np.stack([bytes_ & 15, bytes_ >> 4], -1)]
    return pairs[stored.values].reshape(*stored.values.shape[:-1], -1)


def dequantise(stored: Stored) -> np.ndarray:
    """float32 values, whatever the storage."""
    wide = unpacked(stored).astype(np.float32)
    if stored.groups is not None:
        if stored.groups.zero is not None:
            wide -= spread(stored.groups.zero, stored.groups.size, wide.shape[-1])
        wide *= spread(stored.groups.scale, stored.groups.size, wide.shape[-1])
    return wide if stored.scale is None else wide * stored.scale[..., None]


def spread(of_groups: np.ndarray, size: int, inputs: int) -> np.ndarray:
    """[..., groups] -> [..., inputs] float32."""
    return np.repeat(of_groups.astype(np.float32), size, -1)[..., :inputs]


def quantise_int8(values: np.ndarray) -> Stored:
    """Symmetric per output channel: scale = absmax / 127 in float32 over the last axis."""
    wide = values.astype(np.float32)
    scale = np.maximum(np.abs(wide).max(-1), 1e-12) / np.float32(127)
    return Stored(np.rint(wide / scale[..., None]).astype(np.int8), scale)


def paired(codes: np.ndarray) -> np.ndarray:
    """int4 codes [..., in] in int8 -> bytes [..., in / 2], as `Stored` has them."""
    nibbles = (codes + 8).astype(np.uint8)
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4
