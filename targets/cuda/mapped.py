"""K/V as address space for the longest text in every slot, with memory behind what texts reach.

The driver maps memory in granules of 2 MiB, and kernels read one tensor a layer as if all of it
were there. So a page is what a granule holds of a head's keys: 4,096 positions in FP8, 2,048 in 16
bits. A table of smaller pages would waste less of a text's last one, but every kernel would look
entries up in it; here they are the same instructions.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from specdec.core.pages import PagePlan, Pages
from targets.cuda.launch import call, driver

GRANULE = 2 << 20
"""Bytes that are mapped at once."""

Granules = list[Any]
"""The driver's handles of a page's memory, in the order of `MappedPages._places`."""


@dataclass(frozen=True)
class _Region:
    """The address space of a tensor [slots, heads, positions, ...]."""

    address: int
    heads: int
    head_bytes: int
    """Of a slot's head."""
    page_bytes: int
    """Of a page of it."""


class MappedPages(Pages):
    """`Pages` of one GPU. Memory stays behind a slot's pages until another slot needs it."""

    def __init__(self, plan: PagePlan, slots: int, device: torch.device) -> None:
        super().__init__(plan, slots)
        self._device = device
        self._memory, self._access = _kind_of_memory(device)
        self._spare: list[Granules] = []
        """Pages that were never behind any slot."""
        self._mapped: list[list[Granules]] = [[] for _ in range(slots)]
        self._space: list[tuple[int, int]] = []
        """Address and bytes of each tensor's."""
        self._handles: list[Any] = []
        self._places_mapped: set[int] = set()
        given_back = self._space, self._handles, self._places_mapped
        closing = weakref.finalize(self, _close, self._device, *given_back)
        closing.atexit = False  # the driver has gone then, and all memory with it

    def tensors(self, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
        """The cache's tensors [slots, heads, positions, ...], or blocked forms of it, of which each
        head has whole pages. Takes the memory of all pages. Raises RuntimeError where the GPU has
        no room for it. Call it once."""
        self._regions = [self._reserved(shape, dtype) for shape in shapes]
        self._create(len(self._places(0, 0)))
        self._place(0, 1)  # torch looks up whose memory begins at an address
        parts = zip(self._regions, shapes, strict=True)
        return [self._tensor(region, shape, dtype) for region, shape in parts]

    def _reserved(self, shape: tuple[int, ...], dtype: torch.dtype) -> _Region:
        slots, heads = shape[:2]
        head_bytes = prod(shape[2:]) * dtype.itemsize
        assert head_bytes % (GRANULE * self.plan.most) == 0, (shape, dtype, self.plan)
        size = slots * heads * head_bytes
        address = int(call(driver().cuMemAddressReserve(size, GRANULE, 0, 0)))
        self._space.append((address, size))
        return _Region(address, heads, head_bytes, head_bytes // self.plan.most)

    def _create(self, count: int) -> None:
        """The memory of all pages, `count` granules each."""
        for _ in range(self.plan.total):
            granules: Granules = []
            for _ in range(count):
                granules.append(call(driver().cuMemCreate(GRANULE, self._memory, 0)))
                self._handles.append(granules[-1])
            self._spare.append(granules)

    def _tensor(self, region: _Region, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = prod(shape) * dtype.itemsize
        raw = torch.as_tensor(_Memory(self, region.address, size), device=self._device)
        return raw.view(dtype).view(shape)

    def _place(self, slot: int, count: int) -> None:
        mapped = self._mapped[slot]
        while len(mapped) < count:
            fresh = bool(self._spare)
            granules = self._spare.pop() if fresh else self._taken_back()
            self._map(slot, len(mapped), granules, fresh)
            mapped.append(granules)

    def _map(self, slot: int, number: int, granules: Granules, fresh: bool) -> None:
        """fresh: it may hold anything, while a masked value has to be finite."""
        cuda, stream = driver(), torch.cuda.current_stream(self._device).cuda_stream
        for place, granule in zip(self._places(slot, number), granules, strict=True):
            call(cuda.cuMemMap(place, GRANULE, 0, granule, 0))
            self._places_mapped.add(place)
            call(cuda.cuMemSetAccess(place, GRANULE, [self._access], 1))
            if fresh:
                call(cuda.cuMemsetD8Async(place, 0, GRANULE, stream))

    def _taken_back(self) -> Granules:
        """A page that a slot no longer holds. A cycle that is under way may still write there."""
        torch.cuda.synchronize(self._device)
        slot = next(s for s, mapped in enumerate(self._mapped) if len(mapped) > self.held[s])
        granules = self._mapped[slot].pop()
        for place in self._places(slot, len(self._mapped[slot])):
            call(driver().cuMemUnmap(place, GRANULE))
            self._places_mapped.remove(place)
        return granules

    def _places(self, slot: int, number: int) -> list[int]:
        """Addresses of the granules of a slot's page."""
        return [
            place
            for region in self._regions
            for head in range(slot * region.heads, (slot + 1) * region.heads)
            for place in _steps(region, head, number)
        ]


class _Memory:
    """Device memory as torch takes it. It holds what maps it."""

    def __init__(self, owner: MappedPages, address: int, size: int) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def page_of(granule_heads: list[int]) -> int:
    """Positions of a page. granule_heads: bytes of a position of a head, by tensor."""
    return max(GRANULE // size for size in granule_heads)


def _steps(region: _Region, head: int, number: int) -> range:
    first = region.address + head * region.head_bytes + number * region.page_bytes
    return range(first, first + region.page_bytes, GRANULE)


def _kind_of_memory(device: torch.device) -> tuple[Any, Any]:
    """Pinned memory of this GPU, and who may use it: this GPU, in full."""
    cuda = driver()
    index = torch.cuda.current_device() if device.index is None else device.index
    memory = cuda.CUmemAllocationProp()
    memory.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    memory.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    memory.location.id = index
    access = cuda.CUmemAccessDesc()
    access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = index
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return memory, access


def _close(
    device: torch.device, space: list[tuple[int, int]], handles: list[Any], places: set[int]
) -> None:
    """Give all of it back."""
    cuda = driver()
    torch.cuda.synchronize(device)
    for place in places:
        call(cuda.cuMemUnmap(place, GRANULE))
    for address, size in space:
        call(cuda.cuMemAddressFree(address, size))
    for handle in handles:
        call(cuda.cuMemRelease(handle))
