"""`--drafter eagle3`: a head that reads the target's states."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from drafters.eagle3 import embedded
from drafters.eagle3.files import load_head
from drafters.eagle3.spec import Head, random_head, sized
from drafters.kind import (
    DrafterKind,
    DraftRequest,
    PlacedDrafter,
    find_draft_model,
    own_options,
)
from specdec.core.config import ModelConfig, SpeculationConfig
from specdec.core.errors import UserError
from targets import hub
from targets.backend import Backend

SHORT = (
    "the EAGLE-3 head {} names {} positions in its config.json (max_position_embeddings): beyond "
    "them it goes on drafting, and may be right less often; --draft-window lets it see the last "
    "tokens alone"
)
WINDOW = (
    "How many of the last tokens an EAGLE-3 head sees; 0 for all. By default what its config.json "
    "says (sliding_window). A head is seldom right where it sees more tokens than it saw in "
    "training."
)
EMBEDDED = {model: name for name, model in embedded.NAMES.items()}
"""The embedded models' heads."""


@dataclass(frozen=True)
class EagleOptions:
    draft_window: int | None = field(default=None, metadata={"help": WINDOW})


@dataclass(frozen=True)
class EagleDraft:
    """`Draft`. Its weights are on the host."""

    head: Head
    greedy: bool
    notes: tuple[str, ...] = ()

    @property
    def features(self) -> tuple[int, ...]:
        return self.head.spec.layers

    def extra_bytes(self, shape: Any) -> int:
        from drafters.eagle3.cuda.head import need_bytes

        return need_bytes(self.head.spec, shape)

    def place(self, backend: Backend, target: Any, config: ModelConfig) -> PlacedDrafter:
        return {"jax": _beside_jax, "cuda": _beside_cuda}[target.backend](self, target)


def _beside_jax(draft: EagleDraft, target: Any) -> PlacedDrafter:
    from drafters.eagle3.jax.drafter import EagleDraftHead
    from drafters.eagle3.jax.snapshots import EagleSnapshots
    from targets.jax.host_drafter import HostHead

    def make(k: int) -> HostHead[EagleDraftHead]:
        return HostHead(EagleDraftHead(draft.head, target, k, draft.greedy))

    def snapshots(drafter: HostHead[EagleDraftHead], unit: int) -> EagleSnapshots:
        return EagleSnapshots(drafter.head, unit)

    return PlacedDrafter(make, lambda drafter: drafter.head, snapshots)


def _beside_cuda(draft: EagleDraft, target: Any) -> PlacedDrafter:
    from drafters.cards import place_on_each
    from drafters.eagle3.cuda.drafter import EagleDraftHead
    from drafters.eagle3.cuda.head import placed
    from drafters.eagle3.cuda.snapshots import EagleSnapshots
    from targets.cuda.host_drafter import DeviceHead, HostHead

    def place(rank: Any) -> PlacedDrafter:
        model = placed(draft.head, rank)
        return PlacedDrafter(
            lambda k: HostHead(EagleDraftHead(model, k, draft.greedy)),
            DeviceHead,
            lambda drafter, unit: EagleSnapshots(drafter.head),
        )

    return place_on_each(target, place)


def _resolve(speculation: SpeculationConfig, model: str, random: bool) -> SpeculationConfig:
    window = own_options(EagleOptions, speculation).draft_window
    if window is not None and window < 0:
        raise UserError(f"--draft-window must be 0 (all tokens) or more, got {window}")
    if not random:
        return find_draft_model(speculation, model, EMBEDDED)
    if speculation.draft_model is not None:
        raise UserError(
            "--random makes an EAGLE-3 head for the model's size: leave --draft-model out"
        )
    return speculation


def _read(request: DraftRequest) -> EagleDraft:
    """Raises UserError, too for a head of another target."""
    name = request.speculation.draft_model
    assert name
    folder = embedded.path(name) if name in embedded.NAMES else Path(name)
    if hub.is_name(name) and name not in embedded.NAMES:
        folder = hub.fetched(name)
    if not folder.is_dir():
        raise UserError(
            f"no folder {folder}: --draft-model names an EAGLE-3 head's folder, or one of the "
            "Hugging Face hub's as org/name"
        )
    head = _seeing(load_head(folder, request.arch), request.speculation)
    trained, limit = head.spec.max_position, request.arch.max_position
    if trained >= limit:
        return EagleDraft(head, request.speculation.greedy)
    # positions are rotary: beyond those it was trained on a head still guesses
    head = head._replace(spec=replace(head.spec, max_position=limit))
    return EagleDraft(head, request.speculation.greedy, (SHORT.format(folder.name, trained),))


def _seeing(head: Head, speculation: SpeculationConfig) -> Head:
    """With the window of `--draft-window`, if it was set."""
    window = own_options(EagleOptions, speculation).draft_window
    if window is None:
        return head
    return head._replace(spec=replace(head.spec, window=window or None))


def _random(request: DraftRequest) -> EagleDraft:
    head = _seeing(random_head(sized(request.arch)), request.speculation)
    return EagleDraft(head, request.speculation.greedy)


KIND = DrafterKind(
    "eagle3",
    "an EAGLE-3 head, which reads the model's states",
    _read,
    random=_random,
    resolve=_resolve,
    options=EagleOptions,
    device_loops=("jax", "cuda"),
)
