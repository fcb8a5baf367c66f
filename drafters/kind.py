"""What a drafter's folder offers: one `DrafterKind`, in its module `kind`. Nobody outside the
folder knows more of it, and `registry.py` alone knows its name.

A drafter comes to be in three steps. `DrafterKind.read` (or `random`) checks what was asked for and
reads it on the host, before gigabytes of the target are loaded: a `Draft`. `Draft.place` puts it
beside the loaded target: a `PlacedDrafter`. That makes a `Drafter` for each engine, and what a
device loop traces or captures of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
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
    """Of drafters that have no options of their own."""


@dataclass(frozen=True)
class Asked:
    """What a drafter is made for. Written by `specdec.assembly.model`."""

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
    """What more there is of a drafter that is made of others."""

    parts: Mapping[str, PlacedDrafter]
    """They can be had alone too, by name."""
    names: Callable[[Any], tuple[str, ...]]
    """Of a drafter: its parts, in the loop that runs it."""
    policy: Callable[[Any], Policy]
    """How such a drafter chooses."""
    wrap_weighted: Callable[[Any, Callable[[Any], Any]], Any]
    """(drafter, wrap) -> the drafter, `wrap` around the part that has weights."""
    wrap_on_device: Callable[[Any, Callable[[Any], Any]], Any]
    """The same of what the device loop runs (`PlacedDrafter.on_device`)."""
    measure: Callable[[Any, Any], None]
    """(engine, drafter): measure what cycles cost, once the engine can run."""


@dataclass(frozen=True)
class PlacedDrafter:
    """A drafter beside its target."""

    make: Callable[[int], Any]
    """A fresh `Drafter` for an engine that drafts k tokens a cycle."""
    on_device: Callable[[Any], Any]
    """What the target's device loop runs of that drafter (`targets.jax.device_drafter`,
    `targets.cuda.device_drafter`). Asked for where the kind has a step for it."""
    snapshots: Callable[[Any, int], Snapshots | None] = lambda drafter, unit: None
    """What that drafter keeps of prompts for the prefix cache, in chunks of so many tokens; None
    for drafters that need the text alone."""
    twin: Callable[[], LookupDrafter] | None = None
    """Makes a drafter for the host that guesses as the device loop's step does; None where `make`'s
    does."""
    composite: Composite | None = None
    """Of drafters that are made of others."""


class Draft(Protocol):
    """A drafter that was asked for and fits the target; its weights, if any, are on the host."""

    @property
    def features(self) -> tuple[int, ...]:
        """The target's layers whose outputs it wants to see, none for most."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for those who start it: what it may choose from, what limits it."""
        ...

    def extra_bytes(self, shape: Any) -> int:
        """What it takes of a GPU beside a target of this shape (`targets.cuda.footprint`), as far
        as it does not check that by itself when it is placed."""
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
    """By backend, for `DrafterKind.device_loops`: makes what that loop runs, from the target."""
    twin: Callable[[], LookupDrafter] | None = None
    """As `PlacedDrafter` has it."""
    features: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def extra_bytes(self, shape: Any) -> int:
        return 0

    def place(self, backend: Backend, target: Any, config: ModelConfig) -> PlacedDrafter:
        return PlacedDrafter(
            lambda k: self.host(),
            lambda drafter: self.steps[target.backend](target),
            twin=self.twin,
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
    """One drafter's folder, as everybody else sees it."""

    name: str
    """What users type."""
    summary: str
    """For `--help`, after the name."""
    read: Callable[[Asked], Draft]
    """Raises UserError for files that are missing, damaged, or of another target."""
    random: Callable[[Asked], Draft] | None = None
    """With random weights, to measure with; None: there are none to make."""
    resolve: Callable[[SpeculationConfig, str, bool], SpeculationConfig] = refuse_draft_model
    """(options, model's name, whether weights are random) -> the options checked, and what follows
    from the model filled in. Raises UserError."""
    options: type = NoOptions
    """A frozen dataclass of its own options: each field has a default and, in its metadata, `help`.
    Its names and types become options of the command line."""
    vllm_method: str | None = None
    """What vLLM's `--speculative-config` calls it; None: the same name."""
    vllm_keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of that JSON that are its own, and the options that they mean."""
    lies_by: Callable[[str], bool] = lambda model: False
    """Whether weights of its own lie in or beside this model's folder. No hub is asked."""
    published: Callable[[str], str | None] = lambda model: None
    """The hub's name of weights of its own that are published for this model, if any. No hub is
    contacted."""
    most_k: int = MAX_DRAFT
    """Most draft tokens of a cycle."""
    device_loops: tuple[str, ...] = ()
    """The backends whose device loop it has a step for."""
    part: Callable[[SpeculationConfig], str | None] | None = None
    """Of a drafter that is made of others: which of them has weights, if any."""

    @property
    def weighted(self) -> bool:
        """Whether it has weights, and is not made of others."""
        return self.random is not None and self.part is None

    def weighted_name(self, speculation: SpeculationConfig) -> str | None:
        """Which drafter's guesses follow from weights: its own name, or that of its part; None
        where all guesses follow from the text."""
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
