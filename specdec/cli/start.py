"""Loads, checks and warms up a model and an engine for a command, with progress on stderr."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from specdec.assembly import engine as engines
from specdec.assembly.engine import NO_REUSE, require_exact
from specdec.assembly.model import Model, Status, load_model, random_model
from specdec.assembly.prefix import host_budget
from specdec.cli.console import console, say_model
from specdec.cli.progress import working
from specdec.core.config import ModelConfig, PrefixConfig, SpeculationConfig
from specdec.core.engine import Engine
from specdec.core.errors import UserError
from specdec.core.types import Sampling

SHOWN: Status = partial(working, console)
"""Shows progress on stderr."""


def check_max_tokens(max_tokens: int) -> None:
    """Before a model is loaded. Raises UserError."""
    if max_tokens < 1:
        raise UserError(f"--max-tokens must be 1 or more, got {max_tokens}")


def loaded_model(
    config: ModelConfig,
    speculation: SpeculationConfig,
    prove: bool = True,
    random: str = "",
    status: Status = SHOWN,
    overlap: float | None = None,
) -> Model:
    """Load a model, or make one of a public model's size with random weights, and prove exactness
    unless it is given by construction. Raises UserError.

    prove: False if nothing is decoded, and for the doctor, which reports failures itself.
    random: the public model's name, "" to load. overlap: see `random_model`.
    """
    if random:
        model = random_model(random, config, speculation, status, overlap)
    else:
        model = load_model(config, speculation, status)
    if prove:
        require_exact(model, speculation, status)
    return model


def warm_up(engine: Engine, samplings: Iterable[Sampling]) -> None:
    """Compile what these requests will need, so that speed is measured without it."""
    with working(console, "compiling"):
        engines.warm_up(engine, samplings)


def started(
    config: ModelConfig,
    speculation: SpeculationConfig,
    max_waiting: int = 256,
    status: Status = SHOWN,
    prefix: PrefixConfig = NO_REUSE,
) -> tuple[Model, Engine]:
    """Everything that a server does before its first request, which then compiles nothing."""
    host_budget(prefix)  # a mistake should not cost the time to load
    model = loaded_model(config, speculation, status=status)
    say_model(model)
    return model, engines.serving_engine(model, speculation, max_waiting, prefix, status)
