"""The report that `include_speculation` requests: for each read of the weights its tokens with the
source of each guess, the rejected guesses, and how long the read took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from serve.runner import Update
from serve.served_tokenizer import ServedTokenizer
from specdec.core.types import CycleReport, Guesser, Speculative

PREDICTION = "prediction"
"""Name of the source of guesses from the request's predicted output."""
GRAMMAR = "grammar"
"""Name of the source of guesses that a grammar forces."""


@dataclass(frozen=True)
class Speculating:
    """The drafter and depth of a server or a request."""

    drafter: str | None
    """The drafter's name; None: no speculation."""
    k: int
    """Draft tokens per cycle."""

    def name(self, guesser: Guesser | str) -> str:
        """The name of a source of guesses in the API."""
        drafter = self.drafter or "none"
        names = {"prediction": PREDICTION, "constraint": GRAMMAR, "drafter": drafter}
        return names.get(guesser, guesser)

    def of(self, wish: Speculative | None) -> Speculating:
        """The drafter and depth for a request with these options."""
        if wish is None:
            return self
        k = self.k if wish.k is None else min(wish.k, self.k)
        return Speculating(wish.drafter or self.drafter, k) if k else Speculating(None, 0)


@dataclass(frozen=True)
class ReportedToken:
    """One accepted, rejected or target-chosen token in a report."""

    id: int
    text: str
    """The decoded text; an incomplete character comes with the token that completes it."""
    guessed_by: str | None
    """Source of the guess; None for the token that the target itself chose."""

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "text": self.text, "guessed_by": self.guessed_by}


@dataclass(frozen=True)
class ReportedCycle:
    """One read of the weights (a prefill or a verify), for one choice."""

    of: str
    """prompt or verify."""
    tokens: tuple[ReportedToken, ...]
    """The emitted tokens: accepted guesses, then the target's own token."""
    rejected: tuple[ReportedToken, ...] = ()
    """Guesses that differ from the target's choice, and those after them, in draft order."""
    seconds: float | None = None
    """How long the cycle took; None for the prompt's prefill."""
    speculating: Speculating | None = None
    """Drafter and depth; only in a choice's first read."""

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "read": self.of,
            "tokens": [token.to_json() for token in self.tokens],
            "rejected": [token.to_json() for token in self.rejected],
            "seconds": self.seconds and round(self.seconds, 6),
        }
        if self.speculating is not None:
            document |= {"drafter": self.speculating.drafter, "k": self.speculating.k}
        return document


class ChoiceReports:
    """Makes the reads of one choice from its updates."""

    def __init__(self, tokenizer: ServedTokenizer, speculating: Speculating) -> None:
        self._tokenizer, self._speculating = tokenizer, speculating
        self._decoder = tokenizer.stream(False)
        self._announced = False

    def feed(self, update: Update, count: int, last: bool) -> ReportedCycle:
        """count: how many of the update's tokens belong to the answer. last: whether this is the
        choice's last update."""
        report = update.report or CycleReport((), (), 0, 0.0)
        accepted = min(report.accepted, count)
        names = [self._speculating.name(guesser) for guesser in report.guessers]
        texts = [self._decoder.step(token) for token in update.tokens[:count]]
        if last and texts:
            texts[-1] += self._decoder.finish()
        tokens = [
            ReportedToken(token, text, names[i] if i < accepted else None)
            for i, (token, text) in enumerate(zip(update.tokens[:count], texts, strict=True))
        ]
        wrong = range(report.accepted, len(report.draft))
        first, self._announced = not self._announced, True
        return ReportedCycle(
            "prompt" if update.report is None else "verify",
            tuple(tokens),
            tuple(self._wrong(report.draft[i], names[i]) for i in wrong),
            None if update.report is None else report.seconds,
            self._speculating if first else None,
        )

    def _wrong(self, token: int, name: str) -> ReportedToken:
        return ReportedToken(token, self._tokenizer.decode([token], False), name)
