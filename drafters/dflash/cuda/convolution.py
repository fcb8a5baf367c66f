"""DFlash 2's convolutions around a sub-layer, in torch: `../jax/convolution.py` has the method."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from drafters.dflash.spec import SIDES, TAPS


def convolved(
    w: dict[str, Tensor], conv: str, group: int, x: Tensor
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A sub-layer's input x [B, U, H] float32 as it is fed, and what is done with its output
    [B U, H]."""
    projection, shape = w[f"{conv}.kernel_projection"], x.shape
    coefficients = F.linear(x.to(projection.dtype), projection).float()
    coefficients = coefficients.unflatten(-1, (SIDES, TAPS, -1)).repeat_interleave(group, -1)
    kernels = w[f"{conv}.base_kernel"] + coefficients
    before, after = kernels.unbind(-3)

    def finished(out: Tensor) -> Tensor:
        return _convolve(after, out.view(shape)).flatten(0, 1)

    return _convolve(before, x), finished


def _convolve(kernels: Tensor, x: Tensor) -> Tensor:
    """kernels [B, U, TAPS, H] over x [B, U, H]: a slot's own tap comes first."""
    earlier = F.pad(x[:, :-1], (0, 0, 1, 0))
    return x * kernels[:, :, 0] + earlier * kernels[:, :, 1]
