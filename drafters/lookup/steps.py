"""The step of lookup in each backend's device loop, for `TextDraft.steps`. A framework is imported
only when its loop's step is made."""

from __future__ import annotations

from typing import Any


def traced(lengths: tuple[int, int], target: Any) -> Any:
    """The step of JAX's loop. lengths: the shortest and the longest suffix, in tokens."""
    from drafters.lookup.jax import TracedLookup
    from targets.jax.device_drafter import TextDrafter

    return TextDrafter(TracedLookup(*lengths))


def captured(lengths: tuple[int, int], target: Any) -> Any:
    """The step of CUDA's loop."""
    from drafters.lookup.cuda import DeviceLookup
    from targets.cuda.cards import step_of

    return step_of(target, lambda rank: DeviceLookup(rank, *lengths))
