"""`--drafter auto`: whichever drafter pays, cycle by cycle and row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from drafters import registry
from drafters.auto.host import NAME, AutoDrafter, Weighted
from drafters.auto.late import LateChooser
from drafters.auto.measure import measure_costs
from drafters.kind import (
    Composite,
    Draft,
    DrafterKind,
    DraftRequest,
    PlacedDrafter,
    own_options,
    refuse_draft_model,
)
from specdec.core.config import ModelConfig, SpeculationConfig
from specdec.core.errors import UserError
from specdec.core.policy.choice import Menu, Policy
from specdec.core.policy.costs import CostTable
from targets.backend import Backend, meter_of

if TYPE_CHECKING:
    from drafters.auto import cuda, jax

    DeviceAuto: TypeAlias = jax.DeviceAuto | cuda.DeviceAuto

TEXTS = "suffix", "ngram"
"""The drafters that read the text, the preferred one first."""
LOOKUP = "suffix"
"""The one of them that device loops take."""
DEPTHS = 0, 1, 3, 7, 15
"""Draft tokens per row that a cycle may verify, beside K, if fewer cost less."""
LATE_DEPTHS = 0, 1, 3
"""The same for device loops, which capture a cycle for each depth with and without weights."""
WITH = (
    "The drafter with weights that auto chooses from, beside those that read the text: model, "
    "eagle3, assistant, dflash, or none. By default an assistant that lies in or beside the "
    "model's folder."
)


@dataclass(frozen=True)
class AutoOptions:
    auto_with: str | None = field(default=None, metadata={"help": WITH})


@dataclass(frozen=True)
class AutoDraft:
    """`Draft` of drafters, by name. weighted: which of them has weights."""

    drafts: dict[str, Draft]
    weighted: str | None
    unused: str | None = None
    """An assistant that is published for the model, where `auto` has none."""

    @property
    def notes(self) -> tuple[str, ...]:
        own = f"auto chooses from {', '.join(self.drafts)}"
        if self.unused is not None:
            own += (
                f"; {self.unused} is published for this model: --auto-with assistant --draft-model "
                f"{self.unused} drafts with it"
            )
        return (own, *(note for draft in self.drafts.values() for note in draft.notes))

    @property
    def features(self) -> tuple[int, ...]:
        return () if self.weighted is None else self.drafts[self.weighted].features

    def extra_bytes(self, shape: Any) -> int:
        return sum(draft.extra_bytes(shape) for draft in self.drafts.values())

    def place(self, backend: Backend, target: Any, config: ModelConfig) -> PlacedDrafter:
        parts = {name: d.place(backend, target, config) for name, d in self.drafts.items()}
        placed = _Placed(parts, self.weighted, target)
        composite = Composite(parts, _names, _policy, _wrapped, _wrapped_on_device, measure_costs)
        own = placed.make, placed.on_device, placed.snapshots
        return PlacedDrafter(*own, composite=composite)


@dataclass(frozen=True)
class _Placed:
    parts: dict[str, PlacedDrafter]
    weighted: str | None
    target: Any

    def make(self, k: int) -> AutoDrafter:
        made = {name: placed.make(k) for name, placed in self.parts.items()}
        name = self.weighted
        weighted = None if name is None else Weighted(name, made.pop(name))
        return AutoDrafter(made, weighted, Policy(k, CostTable(), self._menu(k), name))

    def on_device(self, drafter: AutoDrafter) -> Any:
        """One lookup and the drafter with weights. The lookup is judged by its twin."""
        lookup = self.parts[LOOKUP]
        assert lookup.twin is not None, LOOKUP
        drafter.texts = {LOOKUP: lookup.twin()}
        depths = self._depths(drafter.policy.k, LATE_DEPTHS)
        chooser = LateChooser(drafter, LOOKUP, self.target.slots, depths)
        text = lookup.on_device(drafter.texts[LOOKUP])
        weighted = None
        if drafter.weighted is not None:
            weighted = self.parts[drafter.weighted.name].on_device(drafter.weighted.drafter)
        return _device_drafter(self.target.backend)(chooser, text, weighted)

    def snapshots(self, drafter: AutoDrafter, unit: int) -> Any:
        if self.weighted is None or drafter.weighted is None:
            return None
        return self.parts[self.weighted].snapshots(drafter.weighted.drafter, unit)

    @property
    def _fewer_cost_less(self) -> bool:
        """Whether a cycle verifies what it is given; else all are padded to one width."""
        meter = meter_of(self.target)
        return meter.fed_width(0) < meter.fed_width(1)

    def _depths(self, k: int, shorter: tuple[int, ...]) -> set[int]:
        return {d for d in shorter if d < k and self._fewer_cost_less} | {k}

    def _menu(self, k: int) -> Menu:
        depths = self._depths(k, DEPTHS)
        return Menu.of(depths, {0} if self.weighted is None else {0, 1, max(1, k // 2), k})


def _names(drafter: AutoDrafter) -> tuple[str, ...]:
    return tuple(drafter.parts)


def _policy(drafter: AutoDrafter) -> Policy:
    return drafter.policy


def _device_drafter(backend: str) -> Any:
    if backend == "jax":
        from drafters.auto.jax import DeviceAuto

        return DeviceAuto
    from drafters.auto.cuda import on_device

    return on_device


def _wrapped(drafter: AutoDrafter, wrap: Callable[[Any], Any]) -> AutoDrafter:
    if drafter.weighted is not None:
        drafter.weighted = replace(drafter.weighted, drafter=wrap(drafter.weighted.drafter))
    return drafter


def _wrapped_on_device(drafter: DeviceAuto, wrap: Callable[[Any], Any]) -> DeviceAuto:
    return drafter.with_weighted(wrap)


def _resolve(speculation: SpeculationConfig, model: str, random: bool) -> SpeculationConfig:
    speculation = _filled(speculation, model, random)
    name = _weighted(speculation)
    for text in TEXTS:
        own = replace(speculation, drafter=text, draft_model=None)
        registry.find(text).resolve(own, model, random)  # refuses bad options
    if name is None:
        if speculation.draft_model is not None:
            raise UserError("--draft-model with --drafter auto needs --auto-with: set its type")
        return refuse_draft_model(speculation, model, random)
    if name not in registry.KINDS or not (kind := registry.find(name)).weighted:
        raise UserError(
            "--auto-with must be a drafter with weights (model, eagle3, assistant, dflash) or "
            f"none, got {name!r}"
        )
    return replace(kind.resolve(replace(speculation, drafter=name), model, random), drafter=NAME)


def _filled(speculation: SpeculationConfig, model: str, random: bool) -> SpeculationConfig:
    """With the drafter that has weights in or beside the model's folder, if none was chosen."""
    auto_with = own_options(AutoOptions, speculation).auto_with
    if auto_with is not None or speculation.draft_model is not None or random:
        return speculation
    lying = (kind.name for kind in registry.every() if kind.lies_by(model))
    found = next(lying, None)
    return speculation if found is None else replace(speculation, auto_with=found)  # pyright: ignore[reportCallIssue]


def _weighted(speculation: SpeculationConfig) -> str | None:
    name = own_options(AutoOptions, speculation).auto_with
    return None if name in (None, registry.PLAIN) else registry.ALIASES.get(name, name)


def _read(request: DraftRequest) -> AutoDraft:
    weighted = _weighted(request.speculation)
    names = TEXTS if weighted is None else (*TEXTS, weighted)
    drafts = {name: _part(name, request) for name in names}
    auto_with = own_options(AutoOptions, request.speculation).auto_with
    if auto_with is not None or request.random:
        return AutoDraft(drafts, weighted)
    published = (kind.published(request.model) for kind in registry.every())
    return AutoDraft(drafts, weighted, next(filter(None, published), None))


def _part(name: str, request: DraftRequest) -> Draft:
    kind = registry.find(name)
    read = (request.random and kind.random) or kind.read
    return read(replace(request, speculation=replace(request.speculation, drafter=name)))


KIND = DrafterKind(
    NAME,
    "whichever of suffix, ngram (host loop) and --auto-with pays at present",
    _read,
    random=_read,
    resolve=_resolve,
    options=AutoOptions,
    device_loops=("jax", "cuda"),
    part=_weighted,
)
