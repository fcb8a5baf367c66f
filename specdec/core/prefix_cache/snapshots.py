"""What targets and drafters bring to the prefix cache: copies of what prefill wrote into a slot.

Only what *prefill* wrote for full chunks is ever copied. It is a pure function of the tokens up to
the chunk's end, because chunks are cut at absolute multiples; what decoding wrote for the same
tokens has other bits.
"""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from typing import Any, Protocol

from specdec.core.types import Sequence


class Snapshot(Protocol):
    """A copy of a part of a slot. Opaque to the cache, but for its size."""

    @property
    def device_bytes(self) -> int:
        """What it takes of device memory."""
        ...

    @property
    def host_bytes(self) -> int:
        """What it takes, or would take, of host memory."""
        ...

    def to_host(self) -> Snapshot:
        """The same in host memory; the caller then drops this one."""
        ...


class Snapshots(Protocol):
    """How one owner of state (the target, or a drafter) has its part of a slot copied out and in.

    None in place of a snapshot: the owner has nothing to keep there, and does without it later.
    """

    def take_chunk(self, seq: Sequence, start: int, stop: int) -> Snapshot | None:
        """What belongs to positions start .. stop - 1 for good: entries of global layers. Called
        once they are prefilled, before anything is fed behind them."""
        ...

    def take_boundary(self, seq: Sequence, stop: int) -> Snapshot | None:
        """What is overwritten as the text goes on: rings of sliding layers, as they are when
        positions 0 .. stop - 1 have just been prefilled."""
        ...

    def restore(
        self,
        seq: Sequence,
        stop: int,
        chunks: Seqs[Any],
        boundary: Any,
    ) -> None:
        """Bring `seq.slot`, whatever it held, to where prefilling positions 0 .. stop - 1 of `seq`
        would have brought it. The prompt is longer than that.

        chunks: all of them in order, as this owner took them, and boundary: the one at `stop`; on
        the device, or moved to the host. Raises UserError and MemoryError as `Target.prefill`.
        """
        ...


class TargetSnapshots(Snapshots, Protocol):
    """The target's, which also decides where prompts can be resumed."""

    @property
    def unit(self) -> int:
        """Tokens per chunk that is kept, a multiple of the prefill chunk."""
        ...

    def spare_bytes(self) -> int:
        """Device memory that nobody will need, as far as can be told now that the target is warm;
        0 where the device's memory is the host's."""
        ...
