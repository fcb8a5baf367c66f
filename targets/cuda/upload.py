"""From the host to the GPU, through page-locked memory.

CUDA copies ordinary memory at a tenth of the bus's bandwidth, with any number of threads: 5.5 GB/s
on an H200's host, where this reads 23 GB/s with one thread and 43 with four.
"""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

PIECE = 32 << 20
_local = threading.local()


def as_tensor(values: np.ndarray) -> Tensor:
    """As a tensor without a copy: viewed as a dtype that numpy and torch share."""
    if values.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    if values.dtype == ml_dtypes.float8_e4m3fn:
        return torch.from_numpy(values.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(values)


def upload(values: Tensor, device: str) -> Tensor:
    """The same tensor on the device. Each thread has its own page-locked buffer, so threads read
    side by side while others' pieces are on the bus. On a CPU it is there already."""
    if device == "cpu":
        return values
    out = torch.empty_like(values, device=device)
    source, target = _bytes(values), _bytes(out)
    buffer = _buffer()
    for start in range(0, len(source), PIECE):
        part = source[start : start + PIECE]
        held = buffer[: len(part)].copy_(part)
        target[start : start + PIECE].copy_(held)
    return out


def page_locked(values: np.ndarray) -> Tensor:
    """A copy from which `non_blocking` ones to the device are enqueued: a copy from other memory
    waits for all that the device has to do."""
    return torch.from_numpy(values).pin_memory()


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().flatten().view(torch.uint8)


def _buffer() -> Tensor:
    if not hasattr(_local, "buffer"):
        _local.buffer = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
    return _local.buffer
