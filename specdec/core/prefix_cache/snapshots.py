"""The prefix cache's interface to targets and drafters: copies of what prefill wrote into a slot.

Only what *prefill* wrote for full chunks is ever copied. It is a pure function of the tokens up to
the chunk's end, because chunks are cut at absolute multiples; what decoding wrote for the same
tokens has other bits.
"""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from typing import Any, Protocol

from specdec.core.types import Sequence


class Snapshot(Protocol):
    """A copy of a part of a slot. The cache uses only its size."""

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that it takes."""
        ...

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that it takes, or would take."""
        ...

    def to_host(self) -> Snapshot:
        """The same in host memory; the caller then drops this one. Raises MemoryError."""
        ...


class Snapshots(Protocol):
    """Copies the part of a slot of one owner (the target, or a drafter) out and in.

    None in place of a snapshot: the owner has nothing to keep there, and needs nothing to restore.
    """

    def take_chunk(self, seq: Sequence, start: int, stop: int) -> Snapshot | None:
        """Copy the entries of global layers at positions start .. stop - 1, which don't change
        later. Called once they are prefilled, before anything is fed after them, but for what one
        call read with them: the rest of a picture that lies across `stop`."""
        ...

    def take_boundary(self, seq: Sequence, stop: int) -> Snapshot | None:
        """Copy the rings of sliding layers, which later tokens overwrite, as they are when
        positions 0 .. stop - 1 have just been prefilled."""
        ...

    def restore(
        self,
        seq: Sequence,
        stop: int,
        chunks: Seqs[Any],
        boundary: Any,
    ) -> None:
        """Set `seq.slot` to the state after a prefill of positions 0 .. stop - 1 of `seq`, whatever
        it held before. The prompt is longer than `stop`.

        chunks: this owner's snapshots of all chunks in order. boundary: the one at `stop`. Either
        may be on the device or on the host. Raises UserError and MemoryError like `Target.prefill`.
        """
        ...


class TargetSnapshots(Snapshots, Protocol):
    """The target's snapshots; the target also determines where prompts can be resumed."""

    @property
    def unit(self) -> int:
        """Tokens per chunk that is kept, a multiple of the prefill chunk."""
        ...

    def spare_bytes(self) -> int:
        """Estimate of the device memory that stays unused now that the target is warm; 0 if device
        and host share their memory."""
        ...
