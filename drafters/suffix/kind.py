"""`--drafter suffix`: suffix lookup."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from drafters.kind import Asked, DrafterKind, TextDraft, own_options, refuse_draft_model
from drafters.suffix.host import SHORTEST, SuffixDrafter
from specdec.core.config import SpeculationConfig

HELP = "Shortest suffix that suffix lookup guesses from."
ANSWERS = (
    "Tokens of ended answers that suffix lookup remembers, for requests of the same API key and "
    "cache_salt; 0 for none. Some 0.5 KB each."
)


@dataclass(frozen=True)
class SuffixOptions:
    suffix_min: int = field(default=SHORTEST, metadata={"help": HELP})
    suffix_answers: int = field(default=0, metadata={"help": ANSWERS})


def _resolve(speculation: SpeculationConfig, model: str, random: bool) -> SpeculationConfig:
    _made(own_options(SuffixOptions, speculation))  # refuses bad numbers
    return refuse_draft_model(speculation, model, random)


def _read(asked: Asked) -> TextDraft:
    return TextDraft(partial(_made, own_options(SuffixOptions, asked.speculation)))


def _made(given: SuffixOptions) -> SuffixDrafter:
    return SuffixDrafter(given.suffix_min, given.suffix_answers)


KIND = DrafterKind(
    "suffix",
    "lookup of the longest suffix, no weights, host loop only",
    _read,
    resolve=_resolve,
    options=SuffixOptions,
)
