"""`--drafter dflash`: a head that drafts a whole block in one pass (DFlash, DFlash 2, DSpark and
JetSpec heads; the file decides which)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafters.dflash.files import load_head
from drafters.dflash.spec import BlockHead, PreviousToken, random_head, sized
from drafters.kind import DrafterKind, DraftRequest, PlacedDrafter, find_draft_model
from specdec.core.config import ModelConfig, SpeculationConfig
from specdec.core.errors import UserError
from targets import hub
from targets.backend import Backend

MOST = 15
"""Draft tokens of the longest published block."""
SHORT = (
    "the block drafter {} names {} positions in its config.json (max_position_embeddings): beyond "
    "them it goes on drafting, and may be right less often"
)
FEWER = "the block drafter {} drafts {} tokens a cycle: --k beyond that verifies nothing more"
CONFIDENCE = (
    "the block drafter {} predicts its own acceptance, which is not used: --k says how many"
)


@dataclass(frozen=True)
class BlockDraft:
    """`Draft`. Its weights are on the host."""

    head: BlockHead
    greedy: bool
    notes: tuple[str, ...] = ()

    @property
    def features(self) -> tuple[int, ...]:
        return self.head.spec.taps

    def extra_bytes(self, shape: Any) -> int:
        from drafters.dflash.cuda.footprint import need_bytes

        return need_bytes(self.head.spec, shape)

    def place(self, backend: Backend, target: Any, config: ModelConfig) -> PlacedDrafter:
        return {"jax": _beside_jax, "cuda": _beside_cuda}[target.backend](self, target)


def _beside_jax(draft: BlockDraft, target: Any) -> PlacedDrafter:
    from drafters.dflash.jax.drafter import BlockDraftHead, PlacedBlock
    from drafters.dflash.jax.snapshots import BlockSnapshots
    from targets.jax.host_drafter import HostHead

    placed = PlacedBlock(draft.head, target, draft.greedy)

    def make(k: int) -> HostHead[BlockDraftHead]:
        return HostHead(BlockDraftHead(placed))

    def snapshots(drafter: HostHead[BlockDraftHead], unit: int) -> BlockSnapshots:
        return BlockSnapshots(drafter.head, unit)

    return PlacedDrafter(make, lambda drafter: drafter.head, snapshots)


def _beside_cuda(draft: BlockDraft, target: Any) -> PlacedDrafter:
    from drafters.cards import place_on_each
    from drafters.dflash.cuda.drafter import BlockDraftHead
    from drafters.dflash.cuda.model import placed
    from drafters.dflash.cuda.snapshots import BlockSnapshots
    from targets.cuda.host_drafter import DeviceHead, HostHead

    def place(rank: Any) -> PlacedDrafter:
        model = placed(draft.head, rank)
        return PlacedDrafter(
            lambda k: HostHead(BlockDraftHead(model, draft.greedy)),
            DeviceHead,
            lambda drafter, unit: BlockSnapshots(drafter.head),
        )

    return place_on_each(target, place)


def _resolve(speculation: SpeculationConfig, model: str, random: bool) -> SpeculationConfig:
    if not random:
        return find_draft_model(speculation, model, {})
    if speculation.draft_model is not None:
        raise UserError(
            "--random makes a block drafter for the model's size: leave --draft-model out"
        )
    return speculation


def folder_of(name: str) -> Path:
    """The folder of a head, downloaded if need be. Raises UserError."""
    return hub.folder_of(
        name,
        f"no folder {name}: --draft-model names a block drafter's folder, or one of the Hugging "
        "Face hub's as org/name",
    )


def _read(request: DraftRequest) -> BlockDraft:
    """Raises UserError, too for a head of another target."""
    name = request.speculation.draft_model
    assert name
    folder = folder_of(name)
    head = load_head(folder, request.arch)
    spec, limit, notes = head.spec, request.arch.max_position, []
    if spec.max_position < limit:
        notes.append(SHORT.format(folder.name, spec.max_position))
    if spec.drafts < request.speculation.k:
        notes.append(FEWER.format(folder.name, spec.drafts))
    if isinstance(spec.chooser, PreviousToken) and spec.chooser.confidence:
        notes.append(CONFIDENCE.format(folder.name))
    return BlockDraft(head, request.speculation.greedy, tuple(notes))


def _random(request: DraftRequest) -> BlockDraft:
    return BlockDraft(random_head(sized(request.arch)), request.speculation.greedy)


KIND = DrafterKind(
    "dflash",
    "a head that drafts a block in one pass: DFlash, DFlash 2, DSpark, JetSpec",
    _read,
    random=_random,
    resolve=_resolve,
    folder=folder_of,
    most_k=MOST,
    device_loops=("jax", "cuda"),
)
