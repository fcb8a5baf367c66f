"""Drafters that need no weights: nothing to read, nothing to place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from drafters.kind import no_device_step
from specdec.core.config import ModelConfig
from specdec.core.protocols import Drafter
from targets.backend import Backend


@dataclass(frozen=True)
class WeightlessDraft:
    """`Draft` of a drafter that needs the text alone."""

    name: str
    host: Callable[[], Drafter]
    """Makes the host loop's drafter."""
    on_device: Mapping[str, Callable[[Any], Any]]
    """By backend: makes what its device loop runs, from the target."""

    @property
    def features(self) -> tuple[int, ...]:
        return ()

    def extra_bytes(self, shape: Any) -> int:
        return 0

    def place(self, backend: Backend, target: Any, config: ModelConfig) -> PlacedWeightless:
        return PlacedWeightless(self, target)


@dataclass(frozen=True)
class PlacedWeightless:
    """`PlacedDrafter` of the same."""

    draft: WeightlessDraft
    target: Any

    def drafter(self, k: int) -> Drafter:
        return self.draft.host()

    def on_device(self, drafter: Drafter) -> Any:
        make = self.draft.on_device.get(self.target.backend)
        if make is None:
            raise no_device_step(self.draft.name, self.target)
        return make(self.target)
