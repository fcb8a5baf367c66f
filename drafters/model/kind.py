"""`--drafter model`: a smaller model of the same vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drafters.kind import DrafterKind, DraftRequest, PlacedDrafter, find_draft_model
from drafters.model.host import CATCH_UP, ModelDrafter
from drafters.model.snapshots import ModelSnapshots
from specdec.core.config import ModelConfig, SpeculationConfig
from specdec.core.errors import UserError
from targets import mini
from targets.arch import Arch, released
from targets.backend import Backend, LoadedTarget, TargetRequest, snapshots_of
from targets.mini import checkpoint_path
from targets.model_folder import read_arch
from targets.tokenizer import load_tokenizer

EMBEDDED = {"mini": "mini-e"}
"""The embedded model that drafts for another."""


@dataclass(frozen=True)
class ModelDraft:
    """`Draft`. path: None for random weights."""

    arch: Arch
    path: Path | None
    suppress: tuple[int, ...]
    greedy: bool
    features: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def extra_bytes(self, shape: Any) -> int:
        return 0  # it is loaded after the target, and counted then

    def place(self, backend: Backend, target: Any, config: ModelConfig) -> PlacedDrafter:
        """As many slots as the target's, and as much of the context as the draft model takes; of a
        model on several cards each has the whole draft model."""
        longest = min(target.max_len, self.arch.max_position)
        if config.backend == "jax":
            return placed(
                self._loaded(backend, replace(config, max_len=longest)), target, self.greedy
            )
        from drafters.cards import place_on_each

        own = replace(config, max_len=longest, tp=1)
        return place_on_each(
            target, lambda rank: placed(self._loaded(backend, own), rank, self.greedy)
        )

    def _loaded(self, backend: Backend, config: ModelConfig) -> LoadedTarget:
        request = TargetRequest(k=CATCH_UP - 1, suppress=self.suppress, exact=False, pages=False)
        if self.path is None:
            return backend.random(self.arch, config, request, seed=1)
        return backend.load(self.path, config, request)


def placed(model: Any, target: Any, greedy: bool) -> PlacedDrafter:
    """A loaded draft model beside its target."""
    step = {"jax": _traced, "cuda": _captured}[target.backend]
    return PlacedDrafter(
        lambda k: ModelDrafter(model, greedy),
        lambda drafter: step(drafter, target),
        lambda drafter, unit: ModelSnapshots(drafter, snapshots_of(model)),
    )


def _traced(drafter: ModelDrafter, target: Any) -> Any:
    from drafters.model.jax import DeviceModel

    return DeviceModel(drafter)


def _captured(drafter: ModelDrafter, target: Any) -> Any:
    from drafters.model.cuda import DeviceModel

    return DeviceModel(drafter, target)


def _resolve(speculation: SpeculationConfig, model: str, random: bool) -> SpeculationConfig:
    found = find_draft_model(speculation, model, EMBEDDED)
    if random and found.draft_model in mini.NAMES:
        raise UserError(
            "--random makes the draft model's weights too: name its size, as in --draft-model "
            "gemma-4-e4b"
        )
    return found


def _read(request: DraftRequest) -> ModelDraft:
    """Raises UserError, too for a vocabulary that is not the target's: the same id would be another
    word."""
    assert request.speculation.draft_model and request.tokenizer
    path = checkpoint_path(request.speculation.draft_model)
    vocabulary = request.tokenizer.vocabulary
    arch = read_arch(path)
    own = load_tokenizer(path, arch.vocab).vocabulary
    if own != vocabulary:
        raise UserError(
            f"--draft-model {path.name} has another vocabulary than the model (sha256 {own[:16]}, "
            f"the model's {vocabulary[:16]}): choose a draft model with the model's own tokenizer"
        )
    return ModelDraft(arch, path, request.tokenizer.suppress_ids, request.speculation.greedy)


def _random(request: DraftRequest) -> ModelDraft:
    assert request.speculation.draft_model
    return ModelDraft(
        released(request.speculation.draft_model), None, (), request.speculation.greedy
    )


KIND = DrafterKind(
    "model",
    "a smaller Gemma 4 of the same tokenizer",
    _read,
    random=_random,
    resolve=_resolve,
    vllm_method="draft_model",
    device_loops=("jax", "cuda"),
)
