"""Staging memory: where weights are made while loading, given back whole afterwards.

Making a weight takes several times its size for a moment. torch keeps such memory, cuts it up for
what comes later, and can't give back a piece that still holds anything: 31B kept 2.3 GiB that way.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from targets.cuda.ops import Linear


class Staging:
    """One load's. On a CPU the system looks after its memory itself."""

    def __init__(self, device: str) -> None:
        self._local = threading.local() if device != "cpu" else None

    def aside(self) -> AbstractContextManager[None]:
        """What is allocated within comes from memory of this thread's own."""
        if self._local is None:
            return nullcontext()
        if not hasattr(self._local, "pool"):
            self._local.pool = torch.cuda.MemPool()
        return torch.cuda.use_mem_pool(self._local.pool)

    def settled(self, weight: Linear) -> Linear:
        """A weight that was made aside, where it is to stay."""
        if self._local is None:
            return weight
        scale = None if weight.scale is None else weight.scale.clone()
        return replace(weight, data=weight.data.clone(), scale=scale)
