"""The options that several commands share, by topic, as cyclopts reads them."""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, Token

from drafters import registry
from specdec.core.config import Common, ModelConfig, PrefixConfig, SamplingConfig, SpeculationConfig


def _numbers(kind: type, tokens: Seqs[Token]) -> tuple[float, ...]:
    """`1,8,32`, or the option several times."""
    parts = [part for token in tokens for part in token.value.split(",") if part.strip()]
    return tuple(kind(part) for part in parts)


Whole = Annotated[
    tuple[int, ...], Parameter(converter=lambda _, tokens: _numbers(int, tokens), n_tokens=1)
]
Real = Annotated[
    tuple[float, ...], Parameter(converter=lambda _, tokens: _numbers(float, tokens), n_tokens=1)
]


def _with_drafters() -> type[SpeculationConfig]:
    """`SpeculationConfig` with the drafters' own options and help, from the registry."""
    kinds = "; ".join(f"{kind.name}: {kind.summary}" for kind in registry.every())
    who = f"What guesses: {', '.join(registry.KINDS)}. Never changes the output. {kinds}."
    helps = {name: f.metadata["help"] for name, f in registry.own_fields().items()}
    helps |= {"drafter": who}

    def with_help(name: str, kind: Any) -> Any:
        return Annotated[kind, Parameter(help=helps[name])] if name in helps else kind

    made = registry.config_type(with_help)
    made.__module__ = __name__  # cyclopts takes what it finds in `types` for a builtin
    return made


Json = Annotated[bool, Common, Parameter(help="End stdout with one JSON document.")]
Model = Annotated[ModelConfig, Parameter(name="*", group="Model")]
Prefix = Annotated[PrefixConfig, Parameter(name="*", group="Prefix cache")]
Sampling = Annotated[SamplingConfig, Parameter(name="*", group="Sampling")]
if TYPE_CHECKING:
    Speculation = SpeculationConfig
    AnySpeculation = SpeculationConfig
else:
    AnySpeculation = _with_drafters()
    Speculation = Annotated[AnySpeculation, Parameter(name="*", group="Speculation")]
