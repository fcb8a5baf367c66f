"""The drafters by name. To add one, make its folder and add a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, field, fields, make_dataclass, replace
from importlib import import_module
from json import JSONDecodeError, loads
from typing import Any, get_type_hints

from drafters.kind import DrafterKind
from specdec.core.config import ModelConfig, SpeculationConfig
from specdec.core.errors import UserError

KINDS = {
    "none": "drafters.none.kind",
    "ngram": "drafters.ngram.kind",
    "suffix": "drafters.suffix.kind",
    "model": "drafters.model.kind",
    "eagle3": "drafters.eagle3.kind",
    "assistant": "drafters.assistant.kind",
    "dflash": "drafters.dflash.kind",
    "auto": "drafters.auto.kind",
}
"""Each name's module, imported on first use. Its `KIND` is the `DrafterKind`."""
ALIASES = {"dspark": "dflash", "dflash2": "dflash"}
"""Further names of a drafter: what its files call themselves."""
PLAIN = "none"
"""The drafter of plain decoding."""
SHARED_KEYS = {
    "method": "drafter",
    "model": "draft_model",
    "draft_sample_method": "draft_sample_method",
    "num_speculative_tokens": "k",
}
"""Keys of vLLM's JSON that mean the same for every drafter."""


def find(name: str) -> DrafterKind:
    """The drafter of that name. Raises UserError."""
    if name not in KINDS:
        raise UserError(f"unknown drafter {name!r}: choose one of {', '.join(KINDS)}")
    return import_module(KINDS[name]).KIND


def every() -> list[DrafterKind]:
    return [find(name) for name in KINDS]


def plain(speculation: SpeculationConfig) -> SpeculationConfig:
    """The same, but for plain decoding."""
    return replace(speculation, drafter=PLAIN, k=0)


def config_type(
    annotated: Callable[[str, Any], Any] = lambda name, hint: hint,
) -> type[SpeculationConfig]:
    """`SpeculationConfig` with the drafters' own options as further fields. annotated: (name, type)
    -> what a field is declared as."""
    hints = get_type_hints(SpeculationConfig, include_extras=True)
    hints |= {name: hint for kind in every() for name, hint in get_type_hints(kind.options).items()}
    known = (*fields(SpeculationConfig), *own_fields().values())
    named = [(f.name, annotated(f.name, hints[f.name]), field(default=f.default)) for f in known]
    return make_dataclass("Speculation", named, bases=(SpeculationConfig,), frozen=True)


def own_fields() -> dict[str, Field[Any]]:
    """The options that belong to one drafter alone, by name."""
    return {f.name: f for kind in every() for f in fields(kind.options)}


def resolved(
    speculation: SpeculationConfig, model: ModelConfig, random: bool = False
) -> SpeculationConfig:
    """Checked, with vLLM's JSON folded in and the drafter by its first name, before anything is
    loaded. random: weights are made, the drafter's too. Raises UserError."""
    if speculation.speculative_config is not None:
        speculation = _from_vllm(speculation)
    name = speculation.drafter
    speculation = replace(speculation, drafter=ALIASES.get(name, name))
    return find(speculation.drafter).resolve(speculation, model.model, random)


def _from_vllm(speculation: SpeculationConfig) -> SpeculationConfig:
    names = SHARED_KEYS | {key: name for kind in every() for key, name in kind.vllm_keys.items()}
    try:
        config = loads(speculation.speculative_config or "")
    except JSONDecodeError as problem:
        raise UserError(f"--speculative-config is not JSON: {problem}") from None
    if not isinstance(config, dict) or config.keys() - names.keys():
        strange = ", ".join(config.keys() - names.keys()) if isinstance(config, dict) else config
        raise UserError(
            f"--speculative-config: unknown key {strange}; known are {', '.join(names)}"
        )
    hints = get_type_hints(config_type())
    for key, value in config.items():
        kind = int if hints[names[key]] is int else str
        if type(value) is not kind:  # by type, for true is an int to Python
            raise UserError(f"--speculative-config: {value!r} does not fit {key}")
    values = {names[key]: value for key, value in config.items()}
    methods = {kind.vllm_method or kind.name: kind.name for kind in every()}
    if "drafter" in values:
        values["drafter"] = methods.get(values["drafter"], values["drafter"])
    if values.get("draft_sample_method", "greedy") not in ("probabilistic", "greedy"):
        raise UserError(
            "--speculative-config: draft_sample_method must be probabilistic or greedy, got "
            f"{values['draft_sample_method']!r}"
        )
    return replace(speculation, speculative_config=None, **values)
