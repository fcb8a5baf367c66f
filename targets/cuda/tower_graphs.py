"""A picture's encoding as a CUDA graph: some 1,300 launches, most shorter than what the host needs
for one.

A graph is captured for a number of patches, on which every shape depends and nothing else does. The
first picture of a size runs uncaptured: most sizes come once. A card test asserts that both have
the same bits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from targets.cuda.graphs import Captured, GraphPool

MOST_GRAPHS = 8
"""Sizes that are kept; the one used longest ago makes room."""
MOST_PATCHES = 4096
"""Patches up to which launches bound an encoding: longer ones gain little, and a graph keeps the
memory of all that it computes."""

Encode = Callable[[Tensor, Tensor], Tensor]
"""Levels [P, V] and positions [P, 2] on the device to soft tokens [S, H]."""


@dataclass(frozen=True)
class _Graph:
    levels: Tensor
    positions: Tensor
    captured: Captured[Tensor]


class TowerGraphs:
    """`Encode`, captured from the second picture of a size on."""

    def __init__(self, encode: Encode, device: torch.device) -> None:
        self._encode, self._pool = encode, GraphPool(device)
        self._sizes: OrderedDict[int, _Graph | None] = OrderedDict()
        """By number of patches; None: seen once."""

    def __call__(self, levels: Tensor, positions: Tensor) -> Tensor:
        count = len(positions)
        if count > MOST_PATCHES:
            return self._encode(levels, positions)
        if count not in self._sizes:
            self._keep(count, None)
            return self._encode(levels, positions)
        graph = self._sizes[count] or self._captured(levels, positions)
        self._keep(count, graph)
        graph.levels.copy_(levels)
        graph.positions.copy_(positions)
        return graph.captured.replay().clone()

    def _captured(self, levels: Tensor, positions: Tensor) -> _Graph:
        own = levels.clone(), positions.clone()
        return _Graph(*own, Captured(lambda: self._encode(*own), self._pool))

    def _keep(self, count: int, graph: _Graph | None) -> None:
        self._sizes[count] = graph
        self._sizes.move_to_end(count)
        while len(self._sizes) > MOST_GRAPHS:
            self._sizes.popitem(last=False)
