"""Weights of 4 bits, in whichever of the forms that the kernels take: integers or NVFP4."""

from __future__ import annotations

from torch import Tensor

from targets.cuda import int4, nvfp4
from targets.cuda.int4 import Int4
from targets.cuda.nvfp4 import Nvfp4
from targets.stored import Stored

FourBits = Int4 | Nvfp4
KINDS = "int4", "uint4", "nvfp4"
"""4-bit kinds of weights (`ops.Linear.kind`)."""


def from_stored(stored: Stored, values: Tensor) -> FourBits | None:
    """values: its own bytes, on the device. None where the kernels have no form for it: more bits,
    or integers in groups that no 32 inputs share."""
    if stored.code == "e2m1":
        return nvfp4.from_stored(stored, values)
    return int4.from_stored(stored, values) if stored.code == "int4" else None


def joined(parts: list[FourBits]) -> FourBits | None:
    """Below each other; None where some are integers and some are not."""
    integers = [part for part in parts if isinstance(part, Int4)]
    floats = [part for part in parts if isinstance(part, Nvfp4)]
    if integers and floats:
        return None
    return int4.joined(integers) if integers else nvfp4.joined(floats)
