"""`--drafter ngram`: prompt lookup."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from drafters.kind import Asked, own_options, refuse_draft_model
from drafters.ngram.host import N_MAX, N_MIN, NgramDrafter
from drafters.weightless import WeightlessDraft
from specdec.core.config import SpeculationConfig
from specdec.core.types import MAX_DRAFT


@dataclass(frozen=True)
class NgramOptions:
    ngram_min: int = field(
        default=N_MIN,
        metadata={
            "help": "Shortest suffix that prompt lookup matches; shorter ones say too little."
        },
    )
    ngram_max: int = field(
        default=N_MAX, metadata={"help": "Longest suffix that prompt lookup tries first."}
    )


class NgramKind:
    name = vllm_method = "ngram"
    summary = "prompt lookup in the text so far, no weights"
    options = NgramOptions
    vllm_keys = MappingProxyType(
        {"prompt_lookup_min": "ngram_min", "prompt_lookup_max": "ngram_max"}
    )
    most_k = MAX_DRAFT

    def resolve(
        self, speculation: SpeculationConfig, model: str, random: bool
    ) -> SpeculationConfig:
        self._drafter(speculation)  # refuses bad lengths before any loading
        return refuse_draft_model(speculation)

    def read(self, asked: Asked) -> WeightlessDraft:
        lengths = own_options(NgramOptions, asked.speculation)
        on_device = {"jax": partial(_traced, lengths), "cuda": partial(_captured, lengths)}
        return WeightlessDraft(self.name, partial(self._drafter, asked.speculation), on_device)

    random = read

    def _drafter(self, speculation: SpeculationConfig) -> NgramDrafter:
        lengths = own_options(NgramOptions, speculation)
        return NgramDrafter(lengths.ngram_min, lengths.ngram_max)


def _traced(lengths: NgramOptions, target: Any) -> Any:
    from drafters.ngram.jax import TracedNgram
    from targets.jax.device_drafter import TextDrafter

    return TextDrafter(TracedNgram(lengths.ngram_min, lengths.ngram_max))


def _captured(lengths: NgramOptions, target: Any) -> Any:
    from drafters.ngram.cuda import DeviceNgram

    return DeviceNgram(target, lengths.ngram_min, lengths.ngram_max)


KIND = NgramKind()
