"""The whole contract between the loop and what plugs into it.

The pairing rule, stated once: `features[b, j]` is the state *from which* the target chose
`chosen[b, j]`. Prefill obeys it too. What is emitted is `chosen[b, :accepted + 1]`, never a draft
token. The target owns the KV cache: an entry at position p is valid iff p < the sequence's fed
length, so the length *is* the rollback and there is no `rollback` method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Rows
from typing import Protocol

from specdec.types import Array, Round, Sequence, Step


class Target(Protocol):
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
        Raises UserError for a request that this target can't take, and MemoryError where there is
        no room for it and the target survived: only this sequence fails.
        """
        ...

    def verify(self, seqs: Rows[Sequence], draft: Array) -> Step:
        """Feed each sequence's last token and its draft [B, k] int32 (NO_GUESS allowed).

        Returns chosen [B, k + 1], features [B, k + 1, F]. Row b's result is bitwise the same
        whoever else is in the batch and whatever k is.
        """
        ...


class Drafter(Protocol):
    """Guesses what the target will choose. It can only cost or save time, never change a token."""

    def propose(self, seqs: Rows[Sequence], k: int) -> Array:
        """[B, k] int32 target ids; NO_GUESS where it has nothing to say."""
        ...

    def observe(self, seqs: Rows[Sequence], step: Step, accepted: Array) -> None:
        """Learn what was chosen, and from which features; `seqs[b].tokens` is not extended yet."""
        ...

    def reset(self, seq: Sequence) -> None:
        """`seq` now owns its slot: forget the slot's former owner."""
        ...


Cycle = Callable[[Rows[Sequence], bool], list[Round]]
"""What the engine runs between admissions: one round (host loop) or several (device loop). The
flag asks for no more than one, because somebody's prefill waits for the next turn."""
