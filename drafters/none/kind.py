"""`--drafter none`: plain decoding."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from drafters.kind import Asked, NoOptions, refuse_draft_model
from drafters.none.host import NoDrafter
from drafters.weightless import WeightlessDraft
from specdec.core.config import SpeculationConfig


class NoneKind:
    name = vllm_method = "none"
    summary = "plain decoding"
    options = NoOptions
    vllm_keys = MappingProxyType({})
    most_k = 0

    def resolve(
        self, speculation: SpeculationConfig, model: str, random: bool
    ) -> SpeculationConfig:
        return refuse_draft_model(speculation)

    def read(self, asked: Asked) -> WeightlessDraft:
        return WeightlessDraft(self.name, NoDrafter, {"jax": _traced, "cuda": _captured})

    random = read


def _traced(target: Any) -> Any:
    from drafters.none.jax import TracedNone
    from targets.jax.device_drafter import TextDrafter

    return TextDrafter(TracedNone())


def _captured(target: Any) -> Any:
    from drafters.none.cuda import DeviceNone

    return DeviceNone()


KIND = NoneKind()
