"""Weights of 4 bits, and FP8 in blocks, as wide ones: on the device, faster than on a host."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from targets.stored import NIBBLES, Stored


def dequantised(stored: Stored, values: Tensor) -> Tensor:
    """`stored.dequantise` [..., out, in] float32. values: its own, on the device."""
    wide = _unpacked(stored, values)
    groups = stored.groups
    if groups is not None:
        inner = wide.shape[-1]

        def spread(of_groups: np.ndarray) -> Tensor:
            there = torch.from_numpy(of_groups.astype(np.float32)).to(values.device)
            return there.repeat_interleave(groups.size, -1)[..., :inner]

        if groups.zero is not None:
            wide -= spread(groups.zero)
        wide *= spread(groups.scale)
    if stored.scale is not None:
        wide *= torch.from_numpy(stored.scale).to(values.device)[..., None]
    return wide


def _unpacked(stored: Stored, values: Tensor) -> Tensor:
    if stored.code is None:
        return values.float()
    nibbles = torch.from_numpy(NIBBLES[stored.code].astype(np.float32)).to(values.device)
    both = torch.stack([values & 15, values >> 4], -1).flatten(-2)
    return nibbles[both.int()]
