"""Acceptance statistics: tau, rate per position, histogram. Counts only, so they add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence as Seqs
from dataclasses import dataclass, field
from typing import Any, NamedTuple

FIRST_BUCKET = 512
"""Tokens: texts up to this length are one bucket; each further bucket is twice as long."""


def context_bucket(length: int) -> int:
    """The least length, in tokens, of the bucket of a text's length: 0, 512, 1024, 2048, …"""
    return (
        FIRST_BUCKET << (length // FIRST_BUCKET).bit_length() - 1 if length >= FIRST_BUCKET else 0
    )


def vllm_fields(histogram: Seqs[int], drafted: int) -> dict[str, Any]:
    """Acceptance under the names and definitions of vLLM's `metrics.speculative_decoding`: passes
    without a guess are left out, where tau counts them. histogram: `Acceptance.histogram`, whose
    length is K + 1; drafted: draft tokens."""
    steps, accepted = sum(histogram), sum(i * count for i, count in enumerate(histogram))
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": list(histogram),
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": len(histogram) - 1,
    }


@dataclass
class Guesses:
    """Draft tokens of one source, by position 0 .. k - 1."""

    drafted_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)

    def add(self, drafted: int, accepted: int) -> None:
        """Count the first `drafted` tokens of a draft; of the draft, `accepted` tokens were
        accepted."""
        self.drafted_at.update(range(drafted))
        self.accepted_at.update(range(min(drafted, accepted)))


@dataclass
class Drafts:
    """Verify passes of one source of guesses, by the drafter of the draft's first guess."""

    passes: int = 0
    emitted: int = 0
    """Tokens that they emitted."""

    def add(self, emitted: int) -> None:
        """Count a pass."""
        self.passes += 1
        self.emitted += emitted


class Passes(NamedTuple):
    """A copy of a sequence's verify passes, which a cycle does not change: to be counted later, by
    another thread."""

    lengths: Mapping[int, int]
    """How many accepted 0, 1, 2, ... draft tokens."""
    unguessed: int
    """How many of them had no guess."""
    k: int

    def histogram(self) -> list[int]:
        """How many passes with a guess accepted 0, 1, ... k draft tokens."""
        guessed = [self.lengths.get(accepted, 0) for accepted in range(self.k + 1)]
        return [guessed[0] - self.unguessed, *guessed[1:]]


@dataclass
class Acceptance:
    """Speculation on one sequence, or summed over many. Written by the engine, cycle by cycle.

    Only what was emitted counts: draft tokens beyond a stop or a length limit are not accepted.
    """

    cycles: int = 0
    """Verify passes (one per row and cycle), those without a guess included."""
    emitted: int = 0
    """Tokens that those passes emitted; the token that prefill chose is not among them."""
    drafted_at: Counter[int] = field(default_factory=Counter)
    """Draft tokens proposed, by position 0 .. k - 1."""
    accepted_at: Counter[int] = field(default_factory=Counter)
    """Draft tokens accepted, by position 0 .. k - 1."""
    lengths: Counter[int] = field(default_factory=Counter)
    """How many cycles accepted 0, 1, 2, ... draft tokens."""
    by_context: dict[int, Acceptance] = field(default_factory=dict)
    """The same counts, apart by the text's length before the cycle: see `context_bucket`."""

    def add(self, drafted: list[bool], accepted: int, emitted: int, context: int) -> None:
        """One cycle of one row: which positions held a guess, how many were kept and emitted.
        context: tokens of the text before the cycle."""
        guesses = [i for i, guess in enumerate(drafted) if guess]
        self._add(guesses, accepted, emitted)
        bucket = context_bucket(context)
        if bucket not in self.by_context:
            self.by_context[bucket] = Acceptance()
        self.by_context[bucket]._add(guesses, accepted, emitted)

    def _add(self, guesses: list[int], accepted: int, emitted: int) -> None:
        self.cycles += 1
        self.emitted += emitted
        self.lengths[accepted] += 1
        if guesses:
            self.drafted_at.update(guesses)
        if accepted:
            self.accepted_at.update(range(accepted))

    def merge(self, other: Acceptance) -> None:
        self.cycles += other.cycles
        self.emitted += other.emitted
        for name in ("drafted_at", "accepted_at", "lengths"):
            getattr(self, name).update(getattr(other, name))
        for bucket, counts in other.by_context.items():
            self.by_context.setdefault(bucket, Acceptance()).merge(counts)

    @property
    def tau(self) -> float:
        """Mean tokens emitted per verify pass; 1.0 is plain decoding (EAGLE's tau)."""
        return self.emitted / self.cycles if self.cycles else 1.0

    @property
    def drafted(self) -> int:
        return self.drafted_at.total()

    @property
    def accepted(self) -> int:
        return self.accepted_at.total()

    @property
    def rate(self) -> float:
        """Share of the drafted tokens that were accepted; 0 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def drafts(self) -> int:
        """Verify passes with a guess: what vLLM counts as steps."""
        return self.drafted_at.get(0, 0)

    def passes(self, k: int) -> Passes:
        """As they are now, with drafts of up to k tokens."""
        return Passes(dict(self.lengths), self.cycles - self.drafts, k)

    def histogram(self, k: int) -> list[int]:
        """How many passes with a guess accepted 0, 1, ... k draft tokens."""
        return self.passes(k).histogram()

    def per_position(self, k: int) -> list[float]:
        """P(draft token i was proposed and accepted) per verify pass, for i < k."""
        return [self.accepted_at[i] / self.cycles if self.cycles else 0.0 for i in range(k)]
