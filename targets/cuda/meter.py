"""What is measured on a CUDA target."""

from __future__ import annotations

from collections.abc import Sequence as Seqs

from specdec.core.types import Array, Sequence
from targets.cuda import roofline
from targets.cuda.cards import CardsTarget
from targets.cuda.device import used_bytes
from targets.cuda.footprint import TargetShape, copied_bytes, need
from targets.cuda.target import CudaTarget


class Meter:
    """`targets.backend.Meter`."""

    def __init__(self, target: CudaTarget | CardsTarget) -> None:
        """Of several cards the first one is measured: all have and read as much."""
        self._whole = target
        self._ranks = (target,) if isinstance(target, CudaTarget) else target.ranks
        self.target = self._ranks[0]

    def memory(self) -> dict[str, int] | None:
        if self.target.device.type == "cpu":
            return None
        used = max(used_bytes(rank.device) for rank in self._ranks)
        return self._counted() | {"used": used, "cards": len(self._ranks)}

    def sizes(self) -> tuple[int, int]:
        counted = self._counted()
        return counted["weights"] + counted["copies"], counted["cache"]

    def _counted(self) -> dict[str, int]:
        plan = self.target.plan
        sizes = plan.slots, plan.max_len, 1, plan.chunk
        arch, copied = self.target.arch, self.target.weights.copied
        more = copied, plan.own, self.target.vision, plan.short
        shape = TargetShape(*sizes, plan.dtype, plan.kv_dtype, *more)
        counted = need(arch, shape)
        copies = copied_bytes(arch, shape)
        return {"weights": counted.weights, "copies": copies, "cache": counted.cache}

    def plain(self) -> None:
        return None  # kernels do not pad: the exact one is the fastest

    def at_width(self, width: int) -> tuple[CudaTarget | CardsTarget, int]:
        return self._whole, width

    def fed_width(self, k: int) -> int:
        return k + 1

    def step_bytes(self, batch: int, width: int, context: int) -> int:
        target = self.target
        rows, plan = batch * width, target.plan
        weights = roofline.weight_bytes(
            target.arch, target.dtype, rows, own=plan.own, correlation=plan.correlation
        )
        return weights + roofline.cache_bytes(target.arch, target.kv_dtype, batch, context)

    def read_bandwidth(self) -> float:
        return roofline.read_bandwidth(self.target.device.type)

    def forward_samples(self, seqs: Seqs[Sequence], draft: Array) -> list[float] | None:
        kind = self.target.device.type
        if self._whole is not self.target:
            return None  # one card's forward waits for the others'
        if not self.target.capturable and kind != "cpu":
            return None  # references on a GPU wait for the host: nothing that can be captured
        rows = self.target.feed(seqs, draft)
        return roofline.forward_samples(lambda: self.target.step(rows, False, False), kind)
