"""The whole contract between the loop and what plugs into it.

The pairing rule, stated once: `features[b, j]` is the state *from which* the target chose
`chosen[b, j]`. Prefill obeys it too. What is emitted is `chosen[b, :accepted + 1]`, never a draft
token. The target owns the KV cache: an entry at position p is valid iff p < the sequence's fed
length, so the length *is* the rollback and there is no `rollback` method.

A cycle asks a target to verify and a drafter to propose and observe, for a *batch* of rows. In the
host loop a batch is the running sequences; in a device loop it is arrays on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seqs
from typing import Protocol, TypeVar

from specdec.core.types import Array, Proposal, Round, Sequence, Step

Batch = TypeVar("Batch", contravariant=True)


class Verifier(Protocol[Batch]):
    """What a cycle needs of a target."""

    def verify(self, batch: Batch, draft: Array, /) -> Step:
        """Feed each row's last token and its draft [B, k] int32 (NO_GUESS allowed).

        Returns chosen [B, k + 1] and features, see `Step`. A row's result is bitwise the same
        whoever else is in the batch and whatever k is.
        """
        ...


class Proposer(Protocol[Batch]):
    """What a cycle needs of a drafter."""

    def propose(self, batch: Batch, k: int, /) -> Proposal:
        """At most k guesses for each row. In the host loop a drafter may return fewer columns: the
        target verifies those."""
        ...

    def observe(self, batch: Batch, step: Step, accepted: Array, /) -> None:
        """Learn what the cycle chose, and from which features: `accepted` [B] draft tokens and the
        one after them are kept. The rows are not extended yet. A cycle may have verified fewer
        guesses than the drafter's k."""
        ...


class Target(Verifier[Seqs[Sequence]], Protocol):
    """The model that decides every token. Weights, KV cache, sampling and device are its own."""

    @property
    def slots(self) -> int:
        """How many sequences it can hold at once."""
        ...

    @property
    def max_len(self) -> int:
        """Longest sequence, prompt and output together, in tokens."""
        ...

    @property
    def max_draft(self) -> int:
        """Largest K that `verify` takes: its compiled width less one."""
        ...

    @property
    def prefill_chunk(self) -> int:
        """Prefill chunks are cut at absolute multiples of this many tokens."""
        ...

    def prefill(self, seq: Sequence, start: int, stop: int) -> Step:
        """Feed `seq.tokens[start:stop]` into `seq.slot`; chosen [1, 1], features [1, T, F].

        `chosen` follows position stop - 1 and means something only where stop is the prompt's end.
        Features may be padded beyond the chunk's own T = stop - start tokens.
        Raises UserError for a request that this target can't take, and MemoryError where there is
        no room for it and the target survived: only this sequence fails.
        """
        ...


class Drafter(Proposer[Seqs[Sequence]], Protocol):
    """Guesses what the target will choose. It can only cost or save time, never change a token."""

    def reset(self, seq: Sequence) -> None:
        """`seq` now owns its slot: forget the slot's former owner."""
        ...

    def prefill(self, seq: Sequence, start: int, stop: int, step: Step) -> None:
        """Learn `seq.tokens[start:stop]` of its prompt, which the target has just read: `step` is
        what the target's `prefill` answered. Raises MemoryError where there is no room for it.

        Chunks that the prefix cache has are not prefilled: the drafter's own `Snapshots` bring
        what it knew of them."""
        ...


class LookupDrafter(Drafter, Protocol):
    """A drafter whose guesses follow from the text alone, by a suffix that occurred before."""

    def matched(self, seq: Sequence) -> int:
        """Length in tokens of the suffix that the last guess followed from, 0 where none was
        found."""
        ...


Cycle = Callable[[Seqs[Sequence], bool], list[Round]]
"""What the engine runs between admissions: one round (host loop) or several (device loop). The
flag asks for no more than one, because somebody's prefill waits for the next turn."""
