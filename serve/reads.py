"""What `include_speculation` asks for: who guessed each token, which tokens one read of the weights
gave, what was guessed in vain, and how long the read took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from serve.runner import Update
from serve.served_tokenizer import ServedTokenizer
from specdec.core.types import CycleReport, Guesser, Speculative

PREDICTION, GRAMMAR = "prediction", "grammar"
"""What guesses are called that the drafter did not make."""


@dataclass(frozen=True)
class Speculating:
    """What a server speculates with."""

    drafter: str | None
    """The drafter's name; None: nothing is guessed."""
    k: int
    """Draft tokens per cycle."""

    def name(self, guesser: Guesser | str) -> str:
        """What the wire calls it."""
        drafter = self.drafter or "none"
        names = {"prediction": PREDICTION, "constraint": GRAMMAR, "drafter": drafter}
        return names.get(guesser, guesser)

    def of(self, wish: Speculative | None) -> Speculating:
        """What one request is speculated with."""
        if wish is None:
            return self
        k = self.k if wish.k is None else min(wish.k, self.k)
        return Speculating(wish.drafter or self.drafter, k) if k else Speculating(None, 0)


@dataclass(frozen=True)
class Told:
    """One token."""

    id: int
    text: str
    """As far as it is certain: half a character comes with its other half."""
    guessed_by: str | None
    """None: nobody; a read of the weights paid for it."""

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "text": self.text, "guessed_by": self.guessed_by}


@dataclass(frozen=True)
class Read:
    """One read of the weights, as one choice saw it."""

    of: str
    """prompt or verify."""
    tokens: tuple[Told, ...]
    """What it gave: accepted guesses, then the token that it paid for."""
    rejected: tuple[Told, ...] = ()
    """Guesses that the target did not choose, each as the one after those before it."""
    seconds: float | None = None
    """How long the cycle took; None for the prompt's."""
    speculating: Speculating | None = None
    """Of a choice's first read."""

    def to_json(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "read": self.of,
            "tokens": [token.to_json() for token in self.tokens],
            "rejected": [token.to_json() for token in self.rejected],
            "seconds": self.seconds and round(self.seconds, 6),
        }
        if self.speculating is not None:
            told |= {"drafter": self.speculating.drafter, "k": self.speculating.k}
        return told


class ReadsOfChoice:
    """Feed it one choice's updates."""

    def __init__(self, tokenizer: ServedTokenizer, speculating: Speculating) -> None:
        self._tokenizer, self._speculating = tokenizer, speculating
        self._decoder = tokenizer.stream(False)
        self._told = False

    def feed(self, update: Update, count: int, last: bool) -> Read:
        """count: of the update's tokens, those that are the answer's. last: nothing follows."""
        report = update.report or CycleReport((), (), 0, 0.0)
        accepted = min(report.accepted, count)
        names = [self._speculating.name(guesser) for guesser in report.guessers]
        texts = [self._decoder.step(token) for token in update.tokens[:count]]
        if last and texts:
            texts[-1] += self._decoder.finish()
        tokens = [
            Told(token, text, names[i] if i < accepted else None)
            for i, (token, text) in enumerate(zip(update.tokens[:count], texts, strict=True))
        ]
        wrong = range(report.accepted, len(report.draft))
        first, self._told = not self._told, True
        return Read(
            "prompt" if update.report is None else "verify",
            tuple(tokens),
            tuple(self._wrong(report.draft[i], names[i]) for i in wrong),
            None if update.report is None else report.seconds,
            self._speculating if first else None,
        )

    def _wrong(self, token: int, name: str) -> Told:
        return Told(token, self._tokenizer.decode([token], False), name)
