"""Layers in groups of a repeated pattern, so that a backend can scan over the repeats instead of
layers."""

from __future__ import annotations

from dataclasses import dataclass

from targets.arch import Arch, LayerSpec


@dataclass(frozen=True)
class LayerGroup:
    """The same `pattern` of layers, `repeats` times, starting at layer `first`."""

    first: int
    pattern: tuple[LayerSpec, ...]
    repeats: int

    def layer(self, repeat: int, position: int) -> int:
        """The number of the layer at this position of the pattern, in this repeat of it."""
        return self.first + repeat * len(self.pattern) + position


def place_of(arch: Arch, layer: int) -> tuple[int, int, int]:
    """Where layer number `layer` is: its group, its position in the pattern, and which repeat."""
    for i, group in enumerate(layer_groups(arch)):
        repeat, position = divmod(layer - group.first, len(group.pattern))
        if 0 <= repeat < group.repeats:
            return i, position, repeat
    raise AssertionError(f"layer {layer} of {len(arch.layers)}")


def layer_groups(arch: Arch) -> tuple[LayerGroup, ...]:
    """Cut the layers into runs of a repeated pattern, longest run first, shortest pattern first.

    31B: one group of (5 sliding + 1 global) x 10. E4B: x 4 that own their K/V, x 3 that share.
    """
    found, first = [], 0
    while first < len(arch.layers):
        period, repeats = _longest_run(arch.layers[first:])
        found.append(LayerGroup(first, arch.layers[first : first + period], repeats))
        first += period * repeats
    return tuple(found)


def _longest_run(layers: tuple[LayerSpec, ...]) -> tuple[int, int]:
    best = (1, 1)
    for period in range(1, len(layers) // 2 + 1):
        repeats = 1
        while layers[repeats * period : (repeats + 1) * period] == layers[:period]:
            repeats += 1
        if repeats > 1 and period * repeats > best[0] * best[1]:
            best = (period, repeats)
    return best
