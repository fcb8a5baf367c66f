"""What a replay found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from specdec.audit.receipt import BLOCK, Receipt

Kind = Literal[
    "verified",
    "differs",
    "ends otherwise",
    "text differs",
    "log-probability differs",
    "commitment differs",
    "cannot be compared",
    "refused",
]
FALSE: tuple[Kind, ...] = (
    "differs",
    "ends otherwise",
    "text differs",
    "log-probability differs",
    "commitment differs",
)
"""Verdicts on a claim that was compared, and is not what this model gives."""
GOES_ON = "goes on"
"""The end of an answer that has none yet."""
SHOWN = 8
"""Ids of a list, and characters of a grammar times ten, that a line shows."""


@dataclass(frozen=True)
class Chosen:
    """A token id at one place, and its log-probability there; None where it can't be chosen."""

    id: int
    logprob: float | None

    def __str__(self) -> str:
        value = "never chosen" if self.logprob is None else f"log-probability {self.logprob:.4f}"
        return f"{self.id} ({value})"


@dataclass(frozen=True)
class Verdict:
    """The verdict on one receipt."""

    kind: Kind
    name: str = ""
    """Of the file."""
    tokens: int = 0
    """Ids of the claim."""
    reads: int = 0
    """Reads of the weights that decoding it took."""
    at: int | None = None
    """The place in the answer, from 0, of the first difference; of a commitment, its block."""
    claimed: Chosen | str | None = None
    right: Chosen | str | None = None
    """Both for a difference: of an id, or of an end."""
    reason: str = ""
    """Of a claim that was not compared."""
    conditions: tuple[str, ...] = ()
    """What may have forced the text, beside the prompt."""

    @property
    def false(self) -> bool:
        return self.kind in FALSE

    def __str__(self) -> str:
        lines = [f"{self.name}: {self._sentence()}", *(f"  under {c}" for c in self.conditions)]
        return "\n".join(lines)

    def _sentence(self) -> str:
        match self.kind:
            case "verified":
                end = "so far" if self.claimed is None else f"finish {self.claimed}"
                return f"verified: {self.tokens} ids, {end}, {self.reads} reads"
            case "differs":
                return f"differs at {self.at}: claimed {self.claimed}, right is {self.right}"
            case "ends otherwise":
                return f"ends otherwise: claimed {self.claimed}, right is {self.right}"
            case "text differs":
                return "text differs: the ids are right, and give another text"
            case "log-probability differs":
                return (
                    f"log-probability differs at {self.at}: {self.claimed}, right is {self.right}"
                )
            case "commitment differs":
                return (
                    f"commitment differs in block {self.at} (ids from {BLOCK * (self.at or 0)} "
                    f"on): claimed {self.claimed}, right is {self.right}"
                )
            case _:
                return f"{self.kind}: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        """JSON values, by the names of the fields."""
        return asdict(self)


def exit_code(verdicts: Iterable[Verdict]) -> int:
    """0: all verified. 1: a claim is false. 2: none is, but one was not compared."""
    found = list(verdicts)
    if any(verdict.false for verdict in found):
        return 1
    return 0 if all(verdict.kind == "verified" for verdict in found) else 2


def conditions_of(receipt: Receipt) -> tuple[str, ...]:
    """A line for each condition under which a text may be another one than the model's own."""
    found = []
    if bias := receipt.sampling.logit_bias:
        pairs = ", ".join(f"{token}: {value:g}" for token, value in bias[:SHOWN])
        found.append(f"logit_bias on {len(bias)} ids ({pairs}{_more(bias)})")
    rules = receipt.constraint
    if rules is None:
        return tuple(found)
    if rules.grammar is not None:
        size = 10 * SHOWN
        cut = "…" if len(rules.grammar) > size else ""
        found.append(f"a grammar ({' '.join(rules.grammar[:size].split())}{cut})")
    if rules.allowed is not None:
        ids = ", ".join(map(str, rules.allowed[:SHOWN]))
        found.append(f"{len(rules.allowed)} allowed ids ({ids}{_more(rules.allowed)})")
    if rules.bad_words:
        found.append(f"{len(rules.bad_words)} bad words")
    if rules.min_tokens:
        found.append(f"at least {rules.min_tokens} tokens")
    if rules.budget is not None:
        found.append(f"thoughts of at most {rules.budget.tokens} tokens")
    return tuple(found)


def _more(values: tuple[Any, ...]) -> str:
    return ", …" if len(values) > SHOWN else ""
