"""What several cards send each other: each has a part of every branch's sum (kernels/exchange.cuh).

One process drives all cards. Their memory is reached by peer access, over NVLink or PCIe; nothing
here uses multicast. What a card sends lies in an inbox of the card that reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seqs
from contextlib import contextmanager
from ctypes import Structure, c_int, c_void_p
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from specdec.core.errors import UserError
from targets.cuda.launch import address, call, driver
from targets.cuda.out_of_memory import catching_oom

ROWS_AT_ONCE = 128
"""Rows whose CTAs all run at once, on any Hopper GPU: these send their sums themselves."""
INBOXES = 2
"""In turn: one for what attention adds, one for what the feed-forward does."""
MOST_RANKS = 8
"""Cards that a kernel's job has room for."""
ALREADY_ENABLED = 704
"""The driver's answer where peer access is there already."""

_silent = False


@contextmanager
def silent() -> Iterator[None]:
    """What is launched within neither sends nor waits: the other cards don't run it."""
    global _silent
    before, _silent = _silent, True
    try:
        yield
    finally:
        _silent = before


class Exchange(Structure):
    """`Exchange` of kernels/exchange.cuh."""

    _fields_ = (
        ("own", c_void_p),
        ("scale", c_void_p),
        ("inbox", c_void_p * MOST_RANKS),
        *((name, c_int) for name in ("rank", "rows", "silent", "sent")),
    )


@dataclass(frozen=True)
class Inboxes:
    """One rank's view: where every rank reads, by turn."""

    rank: int
    addresses: tuple[tuple[int, ...], ...]
    """[INBOXES][ranks]"""
    rows: int
    """Rows that an inbox holds."""

    @property
    def ranks(self) -> int:
        return len(self.addresses[0])


@dataclass(frozen=True)
class PartialSum:
    """A branch of which this card has a part: own [M, n] float32 unscaled, the weight's scale [n]
    or None. turn: which inboxes are used."""

    own: Tensor
    scale: Tensor | None
    inboxes: Inboxes
    turn: int

    @property
    def ranks(self) -> int:
        return self.inboxes.ranks

    def job(self, sent: bool = False) -> Exchange:
        """sent: another kernel has sent it."""
        rows = len(self.own)
        assert rows <= self.inboxes.rows, (rows, self.inboxes.rows)
        return Exchange(
            own=address(self.own),
            scale=address(self.scale),
            inbox=(c_void_p * MOST_RANKS)(*self.inboxes.addresses[self.turn]),
            rank=self.inboxes.rank,
            rows=self.inboxes.rows,
            silent=int(_silent),
            sent=int(sent),
        )


class ExchangeMemory:
    """The inboxes of all cards, which each may write. They stay until the process ends."""

    def __init__(self, devices: Seqs[int], rows: int, width: int) -> None:
        """Raises UserError where two cards can't reach each other's memory, or have no room."""
        check_peers(devices)
        self._rows, self._bytes = rows, exchange_bytes(len(devices), rows, width)
        contexts = [_context(device) for device in devices]
        for (a, _), (_, context) in permutations(list(zip(devices, contexts, strict=True)), 2):
            with torch.cuda.device(a):
                (status,) = driver().cuCtxEnablePeerAccess(context, 0)
                if status.value not in (0, ALREADY_ENABLED):
                    raise RuntimeError(f"CUDA driver: {status.name}")
        try:
            with catching_oom("what cards send each other"):
                self._memory = [self._allocate(device) for device in devices]
        except MemoryError as problem:
            raise UserError(str(problem)) from problem

    def _allocate(self, device: int) -> int:
        """Empty: every byte 255. Not of torch's memory, which other cards can't reach."""
        with torch.cuda.device(device):
            where = call(driver().cuMemAlloc(self._bytes))
            call(driver().cuMemsetD8(where, 255, self._bytes))
            torch.cuda.synchronize()
        return int(where)

    def of(self, rank: int) -> Inboxes:
        each = self._bytes // INBOXES
        places = tuple(
            tuple(start + turn * each for start in self._memory) for turn in range(INBOXES)
        )
        return Inboxes(rank, places, self._rows)


def exchange_bytes(ranks: int, rows: int, width: int) -> int:
    """Of a card's inboxes."""
    return INBOXES * ranks * rows * width * 4


def check_peers(devices: Seqs[int]) -> None:
    """Raises UserError where a card can't reach another one's memory, or is of another kind: the
    library's sums, which drafters and long prompts have, may then differ."""
    there = torch.cuda.device_count()
    if len(devices) > there:
        raise UserError(
            f"--tp {len(devices)} needs {len(devices)} GPUs, this machine has {there}: choose a "
            "smaller --tp, or show this process more of them (CUDA_VISIBLE_DEVICES)"
        )
    for a, b in permutations(devices, 2):
        if not torch.cuda.can_device_access_peer(a, b):
            raise UserError(
                f"GPU {a} can't reach the memory of GPU {b}: --tp needs cards with peer access "
                "(nvidia-smi topo -p2p r shows them); run one server per card instead"
            )
    first, *others = devices
    for other in others:
        if _kind(other) != _kind(first):
            raise UserError(
                f"GPU {other} ({_kind(other)}) is of another kind than GPU {first} "
                f"({_kind(first)}): --tp needs equal cards; run one server per card instead"
            )


def _kind(device: int) -> str:
    found = torch.cuda.get_device_properties(device)
    capability = f"compute capability {found.major}.{found.minor}"
    return f"{found.name}, {capability}, {found.multi_processor_count} multiprocessors"


def _context(device: int) -> object:
    with torch.cuda.device(device):
        torch.zeros(1, device="cuda")  # torch makes the context
        return call(driver().cuCtxGetCurrent())
