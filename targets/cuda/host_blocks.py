"""Page-locked host memory in blocks of one size, for what leaves the GPU.

torch's own page-locked memory is allocated in powers of two, so that 0.5 GB may take 1 GB. Here
only the last block of each holder can be partly empty, and any holder can take a block that is
freed, of what leaves the same GPU.
"""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from functools import cache

import torch
from torch import Tensor

BLOCK = 2 << 20
SLAB = 64 << 20
"""Taken at once, and never given back: locking pages takes time."""


class HostBlocks:
    """uint8 [BLOCK] each."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self.taken = 0
        """Bytes of all slabs."""

    def take(self, size: int) -> list[Tensor]:
        """Blocks for so many bytes. Raises MemoryError where the host has none to lock."""
        count = blocks_of(size)
        while len(self._free) < count:
            try:
                slab = torch.empty(SLAB, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as problem:  # whatever its words: nothing was launched
                raise MemoryError(
                    f"the host has no memory to lock for kept prompts ({problem}): start with a "
                    "smaller --cache-ram"
                ) from problem
            self.taken += SLAB
            self._free += slab.split(BLOCK)
        found, self._free = self._free[:count], self._free[count:]
        return found

    def give(self, blocks: Seqs[Tensor]) -> None:
        """They may be taken again at once: a GPU's copies go through one stream, in order."""
        self._free += blocks


def blocks_of(size: int) -> int:
    return -(-size // BLOCK)


@cache
def host_blocks(device: torch.device) -> HostBlocks:
    """This process's, for what leaves this GPU."""
    return HostBlocks()
