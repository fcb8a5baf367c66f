"""`--drafter eagle3`: a head that reads the target's states."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from drafters.eagle3 import embedded
from drafters.eagle3.files import load_head
from drafters.eagle3.spec import Head, random_head, sized
from drafters.kind import Asked, NoOptions, find_draft_model, no_device_step
from specdec.core.config import ModelConfig, SpeculationConfig
from specdec.core.errors import UserError
from specdec.core.types import MAX_DRAFT
from targets.arch import Arch
from targets.backend import Backend

EMBEDDED = {model: name for name, model in embedded.NAMES.items()}
"""The embedded models' heads."""


class EagleKind:
    name = vllm_method = "eagle3"
    summary = "an EAGLE-3 head, which reads the model's states"
    options = NoOptions
    vllm_keys = MappingProxyType({})
    most_k = MAX_DRAFT

    def resolve(
        self, speculation: SpeculationConfig, model: str, random: bool
    ) -> SpeculationConfig:
        if not random:
            return find_draft_model(speculation, model, EMBEDDED)
        if speculation.draft_model is not None:
            raise UserError(
                "--random makes an EAGLE-3 head for the model's size: leave --draft-model out"
            )
        return speculation

    def read(self, asked: Asked) -> EagleDraft:
        """Raises UserError, too for a head of another target."""
        assert asked.speculation.draft_model
        head = load_head(folder_of(asked.speculation.draft_model), asked.arch)
        return EagleDraft(head, asked.arch, asked.speculation.greedy)

    def random(self, asked: Asked) -> EagleDraft:
        return EagleDraft(random_head(sized(asked.arch)), asked.arch, asked.speculation.greedy)


def folder_of(name: str) -> Path:
    """A head's folder, or the embedded head of that name. Raises UserError."""
    folder = embedded.path(name) if name in embedded.NAMES else Path(name)
    if not folder.is_dir():
        raise UserError(f"no folder {folder}: --draft-model names an EAGLE-3 head's folder")
    return folder


@dataclass(frozen=True)
class EagleDraft:
    """`Draft`. Its weights are on the host."""

    head: Head
    arch: Arch
    greedy: bool

    @property
    def features(self) -> tuple[int, ...]:
        return self.head.spec.layers

    def extra_bytes(self, shape: Any) -> int:
        from drafters.eagle3.cuda.head import need_bytes

        return need_bytes(self.head.spec, shape)

    def place(self, backend: Backend, target: Any, config: ModelConfig) -> PlacedEagle:
        head: Any = self.head  # the JAX drafter places it
        if target.backend == "cuda":
            from drafters.eagle3.cuda.head import placed

            head = placed(self.head, target)
        return PlacedEagle(head, target, self.greedy)


@dataclass(frozen=True)
class PlacedEagle:
    """`PlacedDrafter`. head: as the backend's drafter takes it."""

    head: Any
    target: Any
    greedy: bool

    def drafter(self, k: int) -> Any:
        if self.target.backend == "cuda":
            from drafters.eagle3.cuda.drafter import EagleDrafter as CudaDrafter

            return CudaDrafter(self.head, k, self.greedy)
        from drafters.eagle3.jax.drafter import EagleDrafter as JaxDrafter

        return JaxDrafter(self.head, self.target, k, self.greedy)

    def on_device(self, drafter: Any) -> Any:
        if self.target.backend == "jax":
            return drafter  # it is both
        if self.target.backend == "cuda":
            from drafters.eagle3.cuda.drafter import DeviceEagle

            return DeviceEagle(drafter)
        raise no_device_step(KIND.name, self.target)


KIND = EagleKind()
