"""`targets.soundness` where weights lie on a GPU, which reads them a hundred times as fast."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from targets.soundness import refuse_unsound


def is_sound(values: Tensor) -> bool:
    """Whether all of them are finite: reductions without scratch memory, 1 / 30 s for all of 31B.
    Waits for the device, as each piece of an upload does."""
    if values.dtype == torch.float8_e4m3fn:
        # its NaNs are 0x7f and 0xff: the largest of signed bytes, and of unsigned ones
        most = values.view(torch.int8).max().item(), values.view(torch.uint8).max().item()
        return most[0] < 0x7F and most[1] < 0xFF
    if not values.is_floating_point():
        return True
    ends = torch.stack(torch.aminmax(values))  # NaN wins both
    return bool(torch.isfinite(ends).all())


def check_sound(
    stored: tuple[Tensor, Tensor | None], path: Path, name: str
) -> tuple[Tensor, Tensor | None]:
    """Values and scale as they were given. Raises UserError that names the tensor."""
    if not all(is_sound(part) for part in stored if part is not None):
        refuse_unsound(path, name)
    return stored
