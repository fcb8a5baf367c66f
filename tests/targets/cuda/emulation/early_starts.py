"""Early starts of emulated kernels (programmatic dependent launch): hides from a kernel the outputs
of earlier kernels that may still run.

A kernel may start when every CTA of the kernel before has called `griddepcontrol.launch_dependents`
or has ended; its `griddepcontrol.wait` returns when the kernel before has ended. So until its wait,
a kernel runs beside the kernel before and beside those that ran beside that one; only beside the
kernel before if one of its CTAs launches dependents only after its own wait. A kernel that ends
without a wait leaves earlier kernels running.

A kernel's outputs are the bytes that it changes in memory that `torch.empty` and `torch.zeros` have
allocated in this test. Kernels are consecutive if one call of the library launches them; a test
declares the inputs of the first one that were just written (`just_written`).

Caught: a missing wait, a late wait, a read before the wait, an asynchronous copy issued before it,
a next kernel that is launched too early and reads hidden outputs; a write before the wait, by a
launch's first cluster into any memory that the running kernels were given, by other clusters into
memory that those kernels write. Not caught: a read without effect on the compared results; memory
that other functions have allocated; and memory that was freed while a kernel that reads it may
still run (it is never reused here).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor

NOT_A_NUMBER = 0x7FFF
"""As a float16, a bfloat16 and, twice, a float32; as an integer, far beyond all memory."""
Spans = np.ndarray
"""Of memory [n, 2]: addresses, bytes."""
NOTHING: Spans = np.zeros((0, 2), np.int64)


@dataclass(frozen=True, eq=False)
class Launched:
    """A kernel."""

    beside: frozenset[Launched]
    """Those that may still run when it starts."""
    late: bool
    """Some CTA lets the next kernel start only after a wait."""
    outputs: Spans
    made: list[Tensor] = field(repr=False)
    """All that it was given of those."""


@dataclass(frozen=True, eq=False)
class Before:
    """What the next kernel runs beside, and what it may write, with copies of that."""

    beside: frozenset[Launched]
    tensors: list[Tensor]
    copies: list[Tensor]

    def is_shared(self, tensor: Tensor) -> bool:
        """Whether a kernel that may still run reads or writes it."""
        return any(tensor is made for kernel in self.beside for made in kernel.made)


class Starts:
    """Of one test."""

    def __init__(self) -> None:
        self._made: list[ref[Tensor]] = []
        self._last: Launched | None = None
        self._caller: FrameType | None = None
        self._pretended = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While a test runs: what `torch.empty` makes is no number, and registered."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", self._registered(torch.empty, unwritten=True))
            patch.setattr(torch, "zeros", self._registered(torch.zeros, unwritten=False))
            yield

    def _registered(self, make: Callable[..., Tensor], unwritten: bool) -> Callable[..., Tensor]:
        def made(*given: Any, **named: Any) -> Tensor:
            tensor = make(*given, **named)
            self._made.append(ref(tensor))
            if unwritten and tensor.nbytes % 2 == 0:
                tensor.view(-1).view(torch.int16).fill_(NOT_A_NUMBER)
            return tensor

        return made

    def just_written(self, tensors: tuple[Tensor, ...]) -> None:
        """As if a kernel had written them that lets the next one start at once."""
        spans = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
        self._last = Launched(frozenset(), False, np.array(spans, np.int64), list(tensors))
        self._pretended = True

    def before(self, pdl: bool, arguments: bytes) -> Before:
        """arguments: in which the addresses stand of all that the kernel may write."""
        caller = _caller()
        follows = caller is self._caller or self._pretended
        last = self._last if pdl and follows else None
        self._caller, self._pretended = caller, False
        words = np.frombuffer(arguments[: len(arguments) // 8 * 8], np.uint64)
        self._made = [made for made in self._made if made() is not None]
        alive = [made() for made in self._made]
        tensors = [t for t in alive if t is not None and _reaches(words, t)]
        copies = [_elements(t).clone() for t in tensors]
        beside = frozenset() if last is None else {last} | (set() if last.late else last.beside)
        return Before(frozenset(beside), tensors, copies)

    def after(self, before: Before, late: bool) -> None:
        outputs = [_changed(t, c) for t, c in zip(before.tensors, before.copies, strict=True)]
        spans = np.concatenate([NOTHING, *outputs])
        self._last = Launched(before.beside, late, spans, before.tensors)


def outputs(kernels: frozenset[Launched]) -> Spans:
    """Each byte once."""
    spans = np.concatenate([NOTHING, *(kernel.outputs for kernel in kernels)])
    if not len(spans):
        return spans
    spans = spans[np.argsort(spans[:, 0])]
    ends = np.maximum.accumulate(spans.sum(1))
    first = np.concatenate([[True], spans[1:, 0] > ends[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([spans[first, 0], ends[last] - spans[first, 0]], 1)


def _caller() -> FrameType | None:
    """The call of the library that a test made."""
    frame, found = sys._getframe(1), None
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(("targets.", "drafters.")):
            found = frame
        frame = frame.f_back
    return found


def _reaches(words: np.ndarray, tensor: Tensor) -> bool:
    begin = tensor.data_ptr()
    return bool(((words >= begin) & (words < begin + tensor.nbytes)).any())


def _elements(tensor: Tensor) -> Tensor:
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(-1).view(size[tensor.itemsize])


def _changed(tensor: Tensor, before: Tensor) -> Spans:
    """Where elements differ, neighbours as one span."""
    at = (_elements(tensor) != before).nonzero()[:, 0].numpy()
    if not len(at):
        return NOTHING
    starts = at[np.concatenate([[True], np.diff(at) > 1])]
    ends = at[np.concatenate([np.diff(at) > 1, [True]])] + 1
    size = tensor.itemsize
    return np.stack([tensor.data_ptr() + starts * size, (ends - starts) * size], 1)
