"""`--drafter none`: plain decoding."""

from __future__ import annotations

from typing import Any

from drafters.kind import DrafterKind, DraftRequest, TextDraft
from drafters.none.host import NoDrafter


def _read(request: DraftRequest) -> TextDraft:
    return TextDraft(NoDrafter, {"jax": _traced, "cuda": _captured})


def _traced(target: Any) -> Any:
    from drafters.none.jax import TracedNone
    from targets.jax.device_drafter import TextDrafter

    return TextDrafter(TracedNone())


def _captured(target: Any) -> Any:
    from drafters.none.cuda import DeviceNone
    from targets.cuda.cards import step_of

    return step_of(target, lambda rank: DeviceNone())


KIND = DrafterKind("none", "plain decoding", _read, most_k=0, device_loops=("jax", "cuda"))
