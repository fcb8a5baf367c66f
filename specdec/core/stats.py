"""Acceptance statistics: tau, rate per position, histogram. Counts only, so they add up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


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

    def add(self, drafted: list[bool], accepted: int, emitted: int) -> None:
        """One cycle of one row: which positions held a guess, how many were kept and emitted."""
        self.cycles += 1
        self.emitted += emitted
        self.lengths[accepted] += 1
        self.drafted_at.update(i for i, guess in enumerate(drafted) if guess)
        self.accepted_at.update(range(accepted))

    def merge(self, other: Acceptance) -> None:
        self.cycles += other.cycles
        self.emitted += other.emitted
        for name in ("drafted_at", "accepted_at", "lengths"):
            getattr(self, name).update(getattr(other, name))

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

    def per_position(self, k: int) -> list[float]:
        """P(draft token i was proposed and accepted) per verify pass, for i < k."""
        return [self.accepted_at[i] / self.cycles if self.cycles else 0.0 for i in range(k)]
