"""`--drafter suffix`: suffix lookup."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from drafters.kind import Asked, own_options, refuse_draft_model
from drafters.suffix.host import SHORTEST, SuffixDrafter
from drafters.weightless import WeightlessDraft
from specdec.core.config import SpeculationConfig
from specdec.core.types import MAX_DRAFT


@dataclass(frozen=True)
class SuffixOptions:
    suffix_min: int = field(
        default=SHORTEST, metadata={"help": "Shortest suffix that suffix lookup guesses from."}
    )


class SuffixKind:
    name = vllm_method = "suffix"
    summary = "lookup of the longest suffix, no weights, host loop only"
    options = SuffixOptions
    vllm_keys = MappingProxyType({})
    most_k = MAX_DRAFT

    def resolve(
        self, speculation: SpeculationConfig, model: str, random: bool
    ) -> SpeculationConfig:
        self._drafter(speculation)  # refuses a bad length before any loading
        return refuse_draft_model(speculation)

    def read(self, asked: Asked) -> WeightlessDraft:
        return WeightlessDraft(self.name, partial(self._drafter, asked.speculation), {})

    random = read

    def _drafter(self, speculation: SpeculationConfig) -> SuffixDrafter:
        return SuffixDrafter(own_options(SuffixOptions, speculation).suffix_min)


KIND = SuffixKind()
