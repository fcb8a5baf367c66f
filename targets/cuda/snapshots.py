"""What the CUDA target keeps of a slot for the prefix cache.

A chunk is cut out of the global layers, a boundary is the rings as they are. All copies are
enqueued on the current stream, behind what wrote and before what reads.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence as Seqs
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec.core.types import Sequence
from targets.cuda.cache import LANES, LayerCache
from targets.cuda.cards import CardsTarget, on_card
from targets.cuda.host_blocks import BLOCK, blocks_of, host_blocks
from targets.cuda.out_of_memory import catching_oom
from targets.cuda.target import CudaTarget

ALIGN = 256
"""Tensors begin at multiples of so many bytes."""
SNAPSHOT = "a snapshot of a prompt"
"""What needs the memory, in an error."""


class TensorSnapshot:
    """`Snapshot` of several tensors, side by side in one piece of device memory, or in blocks of
    host memory. On a CPU both are one."""

    def __init__(self, shapes: list[tuple[torch.Size, torch.dtype]], data: Tensor) -> None:
        """data: uint8."""
        self._shapes, self._size, self._data = shapes, len(data), data
        self._device, self._blocks = data.device, []

    @classmethod
    @torch.inference_mode()
    def of(cls, parts: Seqs[Tensor]) -> TensorSnapshot:
        """Copies. Raises MemoryError."""
        shapes = [(part.shape, part.dtype) for part in parts]
        with catching_oom(SNAPSHOT):
            size = sum(_padded(*shape) for shape in shapes)
            made = cls(shapes, torch.empty(size, dtype=torch.uint8, device=parts[0].device))
        made.copy_from(parts)
        return made

    @property
    def device_bytes(self) -> int:
        return self._size

    @property
    def host_bytes(self) -> int:
        return self._size if self._device.type == "cpu" else blocks_of(self._size) * BLOCK

    @torch.inference_mode()
    def to_host(self) -> TensorSnapshot:
        if self._device.type == "cpu":
            return self
        host = TensorSnapshot(self._shapes, torch.empty(0, dtype=torch.uint8, device=self._device))
        blocks = host_blocks(self._device)
        host._size, host._blocks = self._size, blocks.take(self._size)
        for block, part in zip(host._blocks, self._data.split(BLOCK), strict=True):
            block[: len(part)].copy_(part, non_blocking=True)
        weakref.finalize(host, blocks.give, host._blocks)
        return host

    def copy_from(self, parts: Seqs[Tensor]) -> None:
        for tensor, part in zip(self.tensors(), parts, strict=True):
            _bits(tensor).copy_(_bits(part))

    @torch.inference_mode()
    def tensors(self) -> list[Tensor]:
        """The tensors on the device: views, or a copy of the host's. Raises MemoryError."""
        data = self._data if not self._blocks else self._uploaded()
        found, first = [], 0
        for shape, dtype in self._shapes:
            size = math.prod(shape) * dtype.itemsize
            found.append(data[first : first + size].view(dtype).view(shape))
            first += _padded(shape, dtype)
        return found

    def _uploaded(self) -> Tensor:
        with catching_oom(SNAPSHOT):
            data = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        for block, part in zip(self._blocks, data.split(BLOCK), strict=True):
            part.copy_(block[: len(part)], non_blocking=True)
        return data


def _padded(shape: torch.Size, dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // ALIGN) * ALIGN


class SlotSnapshots:
    """`TargetSnapshots` of one target."""

    def __init__(self, target: CudaTarget) -> None:
        self.target = target
        self.unit = math.lcm(target.plan.chunk, LANES)
        own = list(zip(target.cache.layers, target.arch.layers, strict=True))
        self._global = [cache for cache, spec in own if cache and spec.window is None]
        self._rings = [cache for cache, spec in own if cache and spec.window is not None]

    def spare_bytes(self) -> int:
        if self.target.device.type == "cpu":
            return 0
        from targets.cuda.device import free_bytes
        from targets.cuda.footprint import MARGIN, TargetShape, prefill_bytes

        plan = self.target.plan
        sizes, copied = (plan.slots, plan.max_len, 1, plan.chunk), self.target.weights.copied
        shape = TargetShape(*sizes, plan.dtype, plan.kv_dtype, copied)
        return max(0, free_bytes() - prefill_bytes(self.target.arch, shape) - MARGIN)

    def take_chunk(self, seq: Sequence, start: int, stop: int) -> TensorSnapshot:
        return TensorSnapshot.of(self._chunk(seq.slot, start, stop))

    def take_boundary(self, seq: Sequence, stop: int) -> TensorSnapshot:
        return TensorSnapshot.of(self._ring(seq.slot))

    @catching_oom(SNAPSHOT)
    @torch.inference_mode()
    def restore(
        self,
        seq: Sequence,
        stop: int,
        chunks: Seqs[TensorSnapshot],
        boundary: TensorSnapshot,
    ) -> None:
        self.target.seat(seq)
        for number, chunk in enumerate(chunks):
            start = number * self.unit
            _copy(self._chunk(seq.slot, start, start + self.unit), chunk)
        _copy(self._ring(seq.slot), boundary)
        text = torch.tensor(seq.tokens[:stop], dtype=torch.int32)
        self.target.cache.tokens[seq.slot, :stop] = text.to(self.target.device)

    def _chunk(self, slot: int, start: int, stop: int) -> list[Tensor]:
        """Its entries, where they lie."""
        blocks = slice(start // LANES, stop // LANES)
        return [
            part
            for cache in self._global
            for part in (cache.k[slot, :, start:stop], cache.v[slot, :, blocks])
        ]

    def _ring(self, slot: int) -> list[Tensor]:
        return [part for cache in self._rings for part in _whole(cache, slot)]


def _whole(cache: LayerCache, slot: int) -> tuple[Tensor, Tensor]:
    return cache.k[slot], cache.v[slot]


def _copy(places: list[Tensor], snapshot: TensorSnapshot) -> None:
    for place, part in zip(places, snapshot.tensors(), strict=True):
        _bits(place).copy_(_bits(part))


def _bits(values: Tensor) -> Tensor:
    """FP8 as bytes: torch can't copy e4m3 everywhere."""
    return values.view(torch.uint8) if values.dtype.itemsize == 1 else values


@dataclass(frozen=True)
class CardsSnapshot:
    """`Snapshot` of a slot on several cards: one of each."""

    each: tuple[TensorSnapshot, ...]

    @property
    def device_bytes(self) -> int:
        """Of the card that has most."""
        return max(part.device_bytes for part in self.each)

    @property
    def host_bytes(self) -> int:
        return sum(part.host_bytes for part in self.each)

    def to_host(self) -> CardsSnapshot:
        return CardsSnapshot(tuple(part.to_host() for part in self.each))


class CardsSnapshots:
    """`Snapshots` of an owner that has a part on each of several cards."""

    def __init__(self, ranks: Seqs[CudaTarget], each: Seqs[Any]) -> None:
        """each: a card's own `Snapshots`, in the order of the ranks."""
        self._cards = list(zip(ranks, each, strict=True))

    def take_chunk(self, seq: Sequence, start: int, stop: int) -> CardsSnapshot | None:
        return self._taken(lambda own: own.take_chunk(seq, start, stop))

    def take_boundary(self, seq: Sequence, stop: int) -> CardsSnapshot | None:
        return self._taken(lambda own: own.take_boundary(seq, stop))

    def restore(
        self,
        seq: Sequence,
        stop: int,
        chunks: Seqs[CardsSnapshot | None],
        boundary: CardsSnapshot | None,
    ) -> None:
        for number, (rank, own) in enumerate(self._cards):
            parts = [chunk and chunk.each[number] for chunk in chunks]
            common = seq, stop, parts, boundary and boundary.each[number]
            on_card(rank, partial(own.restore, *common))

    def _taken(self, take: Callable[[Any], TensorSnapshot | None]) -> CardsSnapshot | None:
        """None where the cards keep nothing: what they keep follows from the text alone."""
        found = [on_card(rank, partial(take, own)) for rank, own in self._cards]
        kept = tuple(part for part in found if part is not None)
        return CardsSnapshot(kept) if kept else None


class CardsTargetSnapshots(CardsSnapshots):
    """`TargetSnapshots` of a model on several cards."""

    def __init__(self, cards: CardsTarget) -> None:
        each = [SlotSnapshots(rank) for rank in cards.ranks]
        super().__init__(cards.ranks, each)
        self.unit = each[0].unit

    def spare_bytes(self) -> int:
        return min(on_card(rank, own.spare_bytes) for rank, own in self._cards)


def snapshots_of(target: CudaTarget | CardsTarget) -> SlotSnapshots | CardsTargetSnapshots:
    """`targets.backend.snapshots_of`."""
    return SlotSnapshots(target) if isinstance(target, CudaTarget) else CardsTargetSnapshots(target)
