"""`--drafter suffix`: suffix lookup. Device loops look for the longest suffix of up to `LONGEST`
tokens, and take what came after its last occurrence; they count nothing, and look at no other
answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from drafters.kind import DrafterKind, DraftRequest, TextDraft, own_options, refuse_draft_model
from drafters.lookup.host import LookupTwin
from drafters.lookup.steps import captured, traced
from drafters.suffix.host import SHORTEST, SuffixDrafter
from specdec.core.config import SpeculationConfig

LONGEST = 32
"""Longest suffix that device loops search for, in tokens: longer ones do not predict better."""
HELP = "Shortest suffix that suffix lookup guesses from."
ANSWERS = (
    "Tokens of ended answers that suffix lookup keeps, for requests of the same API key and "
    "cache_salt; 0 for none. Some 0.5 KB each."
)


@dataclass(frozen=True)
class SuffixOptions:
    suffix_min: int = field(default=SHORTEST, metadata={"help": HELP})
    suffix_answers: int = field(default=0, metadata={"help": ANSWERS})


def _resolve(speculation: SpeculationConfig, model: str, random: bool) -> SpeculationConfig:
    _made(own_options(SuffixOptions, speculation))  # refuses bad numbers
    return refuse_draft_model(speculation, model, random)


def _read(request: DraftRequest) -> TextDraft:
    options = own_options(SuffixOptions, request.speculation)
    lengths = options.suffix_min, max(options.suffix_min, LONGEST)
    steps = {"jax": partial(traced, lengths), "cuda": partial(captured, lengths)}
    return TextDraft(partial(_made, options), steps, partial(LookupTwin, *lengths))


def _made(options: SuffixOptions) -> SuffixDrafter:
    return SuffixDrafter(options.suffix_min, options.suffix_answers)


KIND = DrafterKind(
    "suffix",
    "lookup of the longest suffix, no weights",
    _read,
    resolve=_resolve,
    options=SuffixOptions,
    device_loops=("jax", "cuda"),
)
