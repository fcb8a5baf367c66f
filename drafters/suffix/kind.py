"""`--drafter suffix`: suffix lookup."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from drafters.kind import Asked, DrafterKind, TextDraft, own_options, refuse_draft_model
from drafters.suffix.host import SHORTEST, SuffixDrafter
from specdec.core.config import SpeculationConfig

HELP = "Shortest suffix that suffix lookup guesses from."


@dataclass(frozen=True)
class SuffixOptions:
    suffix_min: int = field(default=SHORTEST, metadata={"help": HELP})


def _resolve(speculation: SpeculationConfig, model: str, random: bool) -> SpeculationConfig:
    SuffixDrafter(own_options(SuffixOptions, speculation).suffix_min)  # refuses a bad length
    return refuse_draft_model(speculation, model, random)


def _read(asked: Asked) -> TextDraft:
    shortest = own_options(SuffixOptions, asked.speculation).suffix_min
    return TextDraft(partial(SuffixDrafter, shortest))


KIND = DrafterKind(
    "suffix",
    "lookup of the longest suffix, no weights, host loop only",
    _read,
    resolve=_resolve,
    options=SuffixOptions,
)
