"""What is measured on a JAX target."""

from __future__ import annotations

from collections.abc import Sequence as Seqs

import jax

from specdec.core.types import Array, Sequence
from targets.jax import roofline
from targets.jax.load import narrowed
from targets.jax.target import JaxTarget


class Meter:
    """`targets.backend.Meter`."""

    def __init__(self, target: JaxTarget) -> None:
        self.target = target

    def memory(self) -> None:
        return None  # XLA allocates most of the device at once: usage is no measure

    def sizes(self) -> tuple[int, int]:
        held = self.target.params, self.target.cache
        weights, cache = (sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in held)
        return weights, cache

    def plain(self) -> JaxTarget:
        """Width 1: the exact one is as wide as the widest verify."""
        return narrowed(self.target)

    def at_width(self, width: int) -> tuple[JaxTarget, int]:
        target = self.plain() if width == 1 else self.target
        return target, target.plan.width

    def fed_width(self, k: int) -> int:
        return self.target.plan.width

    def step_bytes(self, batch: int, width: int, context: int) -> int:
        target = self.target
        weights = roofline.weight_bytes(target.params, target.arch, batch * width)
        return weights + roofline.cache_bytes(target.arch, target.kv_dtype, batch, context)

    def read_bandwidth(self) -> float:
        return roofline.read_bandwidth()

    def forward_samples(self, seqs: Seqs[Sequence], draft: Array) -> None:
        return None  # XLA's programs return host ids: a step is what can be timed
