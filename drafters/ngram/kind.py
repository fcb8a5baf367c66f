"""`--drafter ngram`: prompt lookup."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from drafters.kind import DrafterKind, DraftRequest, TextDraft, own_options, refuse_draft_model
from drafters.lookup.steps import captured, traced
from drafters.ngram.host import N_MAX, N_MIN, NgramDrafter
from specdec.core.config import SpeculationConfig

SHORTEST = "Shortest suffix that prompt lookup matches; shorter ones predict too little."
LONGEST = "Longest suffix that prompt lookup tries first."


@dataclass(frozen=True)
class NgramOptions:
    ngram_min: int = field(default=N_MIN, metadata={"help": SHORTEST})
    ngram_max: int = field(default=N_MAX, metadata={"help": LONGEST})


def _resolve(speculation: SpeculationConfig, model: str, random: bool) -> SpeculationConfig:
    options = own_options(NgramOptions, speculation)
    NgramDrafter(options.ngram_min, options.ngram_max)  # refuses bad lengths before any loading
    return refuse_draft_model(speculation, model, random)


def _read(request: DraftRequest) -> TextDraft:
    options = own_options(NgramOptions, request.speculation)
    lengths = options.ngram_min, options.ngram_max
    steps = {"jax": partial(traced, lengths), "cuda": partial(captured, lengths)}
    return TextDraft(partial(NgramDrafter, *lengths), steps)


KIND = DrafterKind(
    "ngram",
    "prompt lookup in the text so far, no weights",
    _read,
    resolve=_resolve,
    options=NgramOptions,
    vllm_keys={"prompt_lookup_min": "ngram_min", "prompt_lookup_max": "ngram_max"},
    device_loops=("jax", "cuda"),
)
