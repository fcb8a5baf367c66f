"""The interface of a drafter's folder: one `DrafterKind`, in its module `kind`. Code outside the
folder uses only this object, and only `registry.py` contains the drafter's name.

A drafter is made in three steps. `DrafterKind.read` (or `random`) checks the options and reads the
weights on the host, before gigabytes of the target are loaded: a `Draft`. `Draft.place` puts it
beside the loaded target: a `PlacedDrafter`. That makes a `Drafter` for each engine, and the
`DeviceDrafter` that a device loop traces or captures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from specdec.core.config import Loop, ModelConfig, SpeculationConfig
from specdec.core.errors import UserError
from specdec.core.policy.choice import Policy
from specdec.core.prefix_cache.snapshots import Snapshots
from specdec.core.protocols import Drafter, LookupDrafter
from specdec.core.types import MAX_DRAFT
from targets.backend import Backend

if TYPE_CHECKING:
    from targets.arch import Arch
    from targets.tokenizer import Tokenizer


Options = TypeVar("Options")


@dataclass(frozen=True)
class NoOptions:
    """For drafters without options of their own."""


@dataclass(frozen=True)
class DraftRequest:
    """The inputs from which a drafter is made. Written by `specdec.assembly.model`."""

    arch: Arch
    """The target's architecture."""
    tokenizer: Tokenizer | None
    """The target's; None where weights are random."""
    speculation: SpeculationConfig
    """Resolved, with the drafter's own options as fields."""
    random: bool = False
    """Whether weights are made, not read."""
    model: str = ""
    """What the target was called: a folder, a name of the hub or of an embedded model."""


@dataclass(frozen=True)
class Composite:
    """Further members of a drafter that is made of others."""

    parts: Mapping[str, PlacedDrafter]
    """The parts by name; each can also be used alone."""
    names: Callable[[Any], tuple[str, ...]]
    """A drafter's part names, in the loop that runs it."""
    policy: Callable[[Any], Policy]
    """The policy by which a drafter chooses among its parts."""
    wrap_weighted: Callable[[Any, Callable[[Any], Any]], Any]
    """(drafter, wrap) -> the drafter, `wrap` around the part that has weights."""
    wrap_on_device: Callable[[Any, Callable[[Any], Any]], Any]
    """The same for the device loop's drafter (`PlacedDrafter.on_device`)."""
    measure: Callable[[Any, Any], None]
    """(engine, drafter): measure what cycles cost, once the engine can run."""


@dataclass(frozen=True)
class PlacedDrafter:
    """A drafter beside its target."""

    make: Callable[[int], Any]
    """A fresh `Drafter` for an engine that drafts k tokens a cycle."""
    on_device: Callable[[Any], Any]
    """That drafter for the target's device loop (`targets.jax.device_drafter`,
    `targets.cuda.device_drafter`). Called only for backends in `DrafterKind.device_loops`."""
    snapshots: Callable[[Any, int], Snapshots | None] = lambda drafter, unit: None
    """That drafter's snapshots of prompts for the prefix cache, in chunks of so many tokens; None
    for drafters that need the text alone."""
    twin: Callable[[], LookupDrafter] | None = None
    """Makes a host drafter with the same guesses as the device loop's step; None where `make`'s
    drafter has them."""
    composite: Composite | None = None
    """Set for drafters that are made of others."""
    text_alone: bool = False
    """Whether the step of a device loop reads the text itself, and needs no host's drafter."""


class Draft(Protocol):
    """A drafter that is checked against the target; its weights, if any, are on the host."""

    @property
    def features(self) -> tuple[int, ...]:
        """Indices of the target's layers from which it needs outputs; most drafters need none."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that are printed at start: what it may choose from, what limits it."""
        ...

    def extra_bytes(self, shape: Any) -> int:
        """Bytes of GPU memory that it needs beside a target of this shape
        (`targets.cuda.footprint`), except those that it checks itself when it is placed."""
        ...

    def place(self, backend: Backend, target: Any, config: ModelConfig) -> PlacedDrafter:
        """Put it beside the loaded target. Raises UserError."""
        ...


@dataclass(frozen=True)
class TextDraft:
    """`Draft` of a drafter that needs the text alone: nothing to read, nothing to place."""

    host: Callable[[], Drafter]
    """Makes the host loop's drafter."""
    steps: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """By backend, for `DrafterKind.device_loops`: makes that loop's drafter, from the target."""
    twin: Callable[[], LookupDrafter] | None = None
    """As in `PlacedDrafter`."""
    features: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def extra_bytes(self, shape: Any) -> int:
        return 0

    def place(self, backend: Backend, target: Any, config: ModelConfig) -> PlacedDrafter:
        return PlacedDrafter(
            lambda k: self.host(),
            lambda drafter: self.steps[target.backend](target),
            twin=self.twin,
            text_alone=True,
        )


def refuse_draft_model(
    speculation: SpeculationConfig, model: str, random: bool
) -> SpeculationConfig:
    """`DrafterKind.resolve` of drafters without weights of their own. Raises UserError."""
    if speculation.draft_model is not None:
        raise UserError(
            "--draft-model is for drafters with weights of their own, but the drafter is "
            f"{speculation.drafter}"
        )
    return speculation


@dataclass(frozen=True)
class DrafterKind:
    """The interface of one drafter's folder."""

    name: str
    """What users type."""
    summary: str
    """For `--help`, after the name."""
    read: Callable[[DraftRequest], Draft]
    """Raises UserError for files that are missing, damaged, or of another target."""
    random: Callable[[DraftRequest], Draft] | None = None
    """Makes it with random weights, for measurements; None: it has no weights."""
    resolve: Callable[[SpeculationConfig, str, bool], SpeculationConfig] = refuse_draft_model
    """(options, model's name, whether weights are random) -> the options checked, and what follows
    from the model filled in. Raises UserError."""
    options: type = NoOptions
    """A frozen dataclass of its own options: each field has a default and, in its metadata, `help`.
    Its names and types become options of the command line."""
    vllm_method: str | None = None
    """Its name in vLLM's `--speculative-config`; None: the same name."""
    vllm_keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of that JSON for this drafter only, and the options that they set."""
    lies_by: Callable[[str], bool] = lambda model: False
    """Whether its weights are in or beside this model's folder. Without queries to the hub."""
    published: Callable[[str], str | None] = lambda model: None
    """The hub's name of its weights that are published for this model, if any. Without queries to
    the hub."""
    folder: Callable[[str], Path] | None = None
    """The folder of weights that `draft_model` names, downloaded if need be; None where receipts
    do not list these files."""
    most_k: int = MAX_DRAFT
    """Most draft tokens of a cycle."""
    device_loops: tuple[str, ...] = ()
    """The backends for which it has a device-loop step."""
    part: Callable[[SpeculationConfig], str | None] | None = None
    """For a drafter that is made of others: which of them has weights, if any."""

    @property
    def weighted(self) -> bool:
        """Whether it has weights, and is not made of others."""
        return self.random is not None and self.part is None

    def weighted_name(self, speculation: SpeculationConfig) -> str | None:
        """The drafter that guesses by weights: its own name, or that of its part; None if all
        guesses follow from the text."""
        if self.part is not None:
            return self.part(speculation)
        return self.name if self.weighted else None

    def refuse(self, loop: Loop, backend: str) -> None:
        """Raise UserError where it has no step for this loop."""
        if loop == "device" and backend not in self.device_loops:
            raise UserError(
                f"the drafter {self.name} has no step for the device loop of {backend}: use "
                "--loop host"
            )


def own_options(options: type[Options], speculation: SpeculationConfig) -> Options:
    """The drafter's own options, out of a configuration that has them as fields."""
    own = fields(options)  # pyright: ignore[reportArgumentType]
    return options(**{f.name: getattr(speculation, f.name, f.default) for f in own})


def find_draft_model(
    speculation: SpeculationConfig, model: str, embedded: Mapping[str, str]
) -> SpeculationConfig:
    """For drafters with weights: the folder that was named, or the embedded weights for this model.
    Raises UserError."""
    found = speculation.draft_model or embedded.get(model)
    if found is None:
        raise UserError(
            f"--drafter {speculation.drafter} needs --draft-model PATH; without one, every model "
            "drafts with --drafter ngram, and mini with any"
        )
    return replace(speculation, draft_model=found)
