"""A checkpoint, or a public model's size with random weights, loaded with its drafter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seqs
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drafters import registry
from drafters.kind import Draft, DrafterKind, DraftRequest, PlacedDrafter
from specdec.core.config import Loop, ModelConfig, SpeculationConfig
from specdec.core.errors import UserError
from targets import hub, mini
from targets.arch import Arch, released
from targets.backend import Backend, LoadedTarget, TargetRequest, backend_of
from targets.mini import checkpoint_path
from targets.model_folder import read_arch
from targets.tokenizer import Tokenizer, load_tokenizer
from targets.vision.spec import VisionSpec, read_vision

Status = Callable[[str], AbstractContextManager[Any]]
"""A context manager's factory: shows a text while the block runs."""


def quiet(doing: str) -> AbstractContextManager[None]:
    """A `Status` that shows nothing."""
    return nullcontext()


@dataclass(frozen=True)
class Model:
    """A loaded checkpoint with its tokenizer, and the drafters beside it."""

    name: str
    target: LoadedTarget
    tokenizer: Tokenizer
    backend: Backend
    drafters: Mapping[str, PlacedDrafter]
    """By name: the configured drafter, the drafters that it combines, and `none`."""
    loops: Seqs[Loop]
    """The drivers that the target has, the faster one first."""
    config: ModelConfig
    """What was loaded, with the context that was chosen."""
    k: int
    """Most draft tokens for which it was loaded, and memory planned."""
    notes: tuple[str, ...] = ()
    """Sentences about the drafter and what else is not as expected, printed at start."""


def load_model(
    config: ModelConfig,
    speculation: SpeculationConfig,
    status: Status = quiet,
    features: tuple[int, ...] = (),
) -> Model:
    """Load a checkpoint with its drafter. speculation: resolved. features: layers whose outputs the
    target returns although the drafter reads none. Raises UserError."""
    backend, kind, loops = _asked(config, speculation)
    with status(f"looking for {config.model}"):
        path = checkpoint_path(config.model)
    name = hub.repo_of(config.model) if hub.is_name(config.model) else path.name
    arch = read_arch(path)
    tokenizer = load_tokenizer(path, arch.vocab)
    draft = kind.read(DraftRequest(arch, tokenizer, speculation, model=config.model))
    if max(features, default=0) >= len(arch.layers):
        raise UserError(f"{name} has {len(arch.layers)} layers, and no layer {max(features)}")
    backend.prepare(config)
    with status(f"loading {name}"):
        request = _request(speculation, draft, tokenizer.suppress_ids)
        seen, blind = _vision(path, config)
        request = replace(request, features=request.features or features, vision=seen)
        config = _sized(backend, arch, path, config, request)
        target = backend.load(path, config, request)
        drafters = _placed(kind, draft, arch, backend, target, config)
    notes = (*draft.notes, *blind)
    return Model(name, target, tokenizer, backend, drafters, loops, config, speculation.k, notes)


def random_model(
    name: str,
    config: ModelConfig,
    speculation: SpeculationConfig,
    status: Status = quiet,
    overlap: float | None = None,
) -> Model:
    """A public model's true size with random weights, and mini's tokenizer. overlap: of a mixture,
    as `TargetRequest.routing_overlap` has it. Raises UserError."""
    backend, kind, loops = _asked(config, speculation)
    arch = released(name)
    backend.prepare(config)
    with status(f"making random weights of {name}"):
        draft = (kind.random or kind.read)(DraftRequest(arch, None, speculation, random=True))
        request = replace(_request(speculation, draft), routing_overlap=overlap)
        config = _sized(backend, arch, None, config, request)
        target = backend.random(arch, config, request)
        drafters = _placed(kind, draft, arch, backend, target, config)
    tokenizer = load_tokenizer(mini.path("mini"))
    return Model(name, target, tokenizer, backend, drafters, loops, config, speculation.k)


def _asked(
    config: ModelConfig, speculation: SpeculationConfig
) -> tuple[Backend, DrafterKind, Seqs[Loop]]:
    """The backend, the drafter's kind and the target's loops. Raises UserError, before anything is
    read, for a drafter without a step for the loop that would run it."""
    backend, kind = backend_of(config, speculation.loop), registry.find(speculation.drafter)
    loops = backend.loops(config)
    kind.refuse(speculation.loop or loops[0], config.backend)
    return backend, kind, loops


def _sized(
    backend: Backend, arch: Arch, path: Path | None, config: ModelConfig, request: TargetRequest
) -> ModelConfig:
    """With a context, where none was given. Raises UserError."""
    if config.max_len is not None:
        return config
    return replace(config, max_len=backend.context(arch, path, config, request))


def _vision(path: Path, config: ModelConfig) -> tuple[VisionSpec | None, tuple[str, ...]]:
    """The image side, None where no pictures are taken, and why not where the checkpoint seems to
    have one. Raises UserError for pictures' options there."""
    found, reason = None, ""
    if config.images != "off":
        try:
            found = read_vision(path, config.image_tokens)
        except UserError as problem:
            if config.image_tokens is not None:
                raise
            reason = f"pictures are not taken: {problem}"  # the text is as good as ever
    if found is not None and _on_cards(config):
        found, reason = None, "pictures are taken on one GPU alone, not yet on several (--tp)"
    if found is None and config.image_tokens is not None:
        where = " on one GPU" if _on_cards(config) else ""
        raise UserError(f"--image-tokens is for models that take pictures{where}: leave it out")
    return found, (reason,) if reason else ()


def _on_cards(config: ModelConfig) -> bool:
    return config.backend == "cuda" and config.tp > 1


def _request(
    speculation: SpeculationConfig, draft: Draft, suppress: tuple[int, ...] = ()
) -> TargetRequest:
    return TargetRequest(
        k=speculation.k,
        suppress=suppress,
        features=draft.features,
        extra_bytes=draft.extra_bytes,
    )


def _placed(
    kind: DrafterKind,
    draft: Draft,
    arch: Arch,
    backend: Backend,
    target: Any,
    config: ModelConfig,
) -> dict[str, PlacedDrafter]:
    plain = registry.find(registry.PLAIN).read(DraftRequest(arch, None, SpeculationConfig()))
    drafts = {registry.PLAIN: plain, kind.name: draft}
    placed = {name: one.place(backend, target, config) for name, one in drafts.items()}
    composite = placed[kind.name].composite
    return placed if composite is None else {**composite.parts, **placed}
