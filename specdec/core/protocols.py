"""The contract between the loop, targets and drafters.

The pairing rule, stated once: `features[b, j]` is the state *from which* the target chose
`chosen[b, j]`. Prefill obeys it too. What is emitted is `chosen[b, :accepted + 1]`, never a draft
token. The target owns the KV cache: an entry at position p is valid iff p < the sequence's fed
length, so the length *is* the rollback and there is no `rollback` method.

A cycle calls a drafter's `propose`, a target's `verify` and the drafter's `observe` for a *batch*
of rows. In the host loop a batch is the running sequences; in a device loop it is arrays on the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seqs
from typing import Protocol, TypeVar

from specdec.core.types import Array, Proposal, Round, Sequence, Step

Batch = TypeVar("Batch", contravariant=True)


class Verifier(Protocol[Batch]):
    """The part of a target that a cycle uses."""

    def verify(self, batch: Batch, draft: Array, /) -> Step:
        """Feed each row's last token and its draft [B, k] int32 (NO_GUESS allowed).

        Returns chosen [B, k + 1] and features, see `Step`. A row's result is bitwise independent of
        the other rows and of k.
        """
        ...


class Proposer(Protocol[Batch]):
    """The part of a drafter that a cycle uses."""

    def propose(self, batch: Batch, k: int, /) -> Proposal:
        """At most k guesses for each row. In the host loop a drafter may return fewer columns: the
        target verifies those."""
        ...

    def observe(self, batch: Batch, step: Step, accepted: Array, /) -> None:
        """Update the drafter's state after a verify: of `step.chosen`, `accepted` [B] tokens and
        the one after them are kept. The rows are not extended yet. A cycle may have verified fewer
        guesses than the drafter's k."""
        ...


class Target(Verifier[Seqs[Sequence]], Protocol):
    """The model that chooses every token. It owns the weights, the KV cache, sampling and the
    device."""

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

        `chosen` follows position stop - 1 and is valid only if stop is the prompt's end.
        Features may be padded beyond the chunk's own T = stop - start tokens.
        Raises UserError for a request that this target can't take, and MemoryError if memory is
        short but the target can go on: only this sequence fails.
        """
        ...

    def prefill_parts(self, seq: Sequence, start: int, stop: int) -> Iterator[Step | None]:
        """`prefill` in parts, each about as long as others may wait: None after each but the last,
        then the step. Other sequences may be decoded or prefilled in between."""
        ...

    def together(self, lengths: Seqs[int]) -> list[int]:
        """Which of the prompts of so many tokens one call of `prefill_all` reads: numbers within
        `lengths`, the first one's among them."""
        ...

    def prefill_all(self, seqs: Seqs[Sequence]) -> list[Step]:
        """Several whole prompts in one call; what `prefill` returns for each. Raises as that does,
        without saying for which."""
        ...


class OneByOne:
    """The part of a `Target` that reads each prompt alone, a chunk at once."""

    def prefill_parts(self: Target, seq: Sequence, start: int, stop: int) -> Iterator[Step | None]:
        yield self.prefill(seq, start, stop)

    def together(self, lengths: Seqs[int]) -> list[int]:
        return [0]

    def prefill_all(self: Target, seqs: Seqs[Sequence]) -> list[Step]:
        return [self.prefill(seq, 0, seq.prompt_len) for seq in seqs]


class Drafter(Proposer[Seqs[Sequence]], Protocol):
    """Guesses what the target will choose. It can only cost or save time, never change a token."""

    def reset(self, seq: Sequence) -> None:
        """Clear the state of `seq.slot`, which `seq` owns from now on."""
        ...

    def prefill(self, seq: Sequence, start: int, stop: int, step: Step) -> None:
        """Read `seq.tokens[start:stop]` of the prompt. `step` is the result of the target's
        `prefill` of the same tokens. Raises MemoryError if memory is short.

        Chunks from the prefix cache are not prefilled: the drafter's own `Snapshots` restore its
        state."""
        ...


class LookupDrafter(Drafter, Protocol):
    """A drafter that guesses from the text alone: it continues an earlier occurrence of the text's
    suffix."""

    def matched(self, seq: Sequence) -> int:
        """Length in tokens of the suffix that gave the last guess, 0 if none was found."""
        ...


Cycle = Callable[[Seqs[Sequence], bool], list[Round]]
"""(rows, single) -> rounds: what the engine runs in a step, one round (host loop) or several
(device loop). `single`: run at most one, because a prompt chunk is to be prefilled in the next
step."""
