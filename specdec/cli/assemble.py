"""From configuration to a running engine: checkpoint, target, drafter, loop."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from specdec.cli.backends import Backend, LoadedTarget, backend_of
from specdec.cli.config import ModelConfig, SpeculationConfig
from specdec.cli.drafting import (
    checkpoint_path,
    draft_dimensions,
    draft_folder,
    head_dimensions,
    make_drafter,
    read_head,
)
from specdec.cli.progress import working
from specdec.cycle import host_cycle
from specdec.engine import Engine
from specdec.errors import UserError
from specdec.record import run_record
from specdec.stats import Acceptance
from specdec.synthetic import synthetic_cycle
from specdec.types import Sampling, Sequence

if TYPE_CHECKING:
    from specdec.types import Array
    from targets.tokenizer import Tokenizer

console = Console(stderr=True, highlight=False)
"""People read stderr; stdout carries text and, last, JSON."""
WARM_TOKENS = 12
"""Enough for a prefill and one dispatch of either loop."""
PROVEN_ROWS = 8
"""Rows that both loops decode before either is trusted; more would only take longer."""
VARIANTS = tuple(Sampling(temperature=t, logprobs=n, seed=1) for t in (0.0, 1.0) for n in (None, 0))
"""One request for each variant of the compiled programs."""


@dataclass(frozen=True)
class Model:
    """A loaded checkpoint with its tokenizer."""

    name: str
    target: LoadedTarget
    tokenizer: Tokenizer
    backend: Backend
    draft: Any = None
    """The draft model's target or the placed EAGLE-3 head, where the drafter has one."""


def load_model(config: ModelConfig, speculation: SpeculationConfig, prove: bool = True) -> Model:
    """Load and prove exactness where it isn't given by construction. Raises UserError.

    prove: False where nothing is decoded, and for the doctor, who reports instead of refusing.
    """
    from targets.arch import read_arch
    from targets.tokenizer import load_tokenizer

    backend = backend_of(config)
    path = checkpoint_path(config.model)
    arch = read_arch(path)
    tokenizer, head = load_tokenizer(path, arch.vocab), read_head(speculation, arch)
    folder, suppress = draft_folder(speculation, tokenizer), tokenizer.suppress_ids
    backend.prepare(config)
    with working(console, f"loading {path.name}"):
        target = backend.load(path, config, speculation, suppress, head and head.spec)
        draft = folder and backend.load_draft(folder, config, suppress)
        draft = backend.place_head(head, target) if head else draft
    model = Model(path.name, target, tokenizer, backend, draft)
    if prove:
        require_exact(model, speculation)
    return model


def random_model(name: str, config: ModelConfig, speculation: SpeculationConfig) -> Model:
    """A public model's true size with random weights, and mini's tokenizer. Raises UserError."""
    from drafters.eagle3.spec import random_head
    from targets import mini
    from targets.arch import released
    from targets.tokenizer import load_tokenizer

    backend, arch = backend_of(config), released(name)
    small, shape = draft_dimensions(speculation), head_dimensions(speculation, arch)
    backend.prepare(config)
    with working(console, f"making random weights of {name}"):
        target = backend.random(arch, config, speculation, shape)
        draft = small and backend.random_draft(small, config)
        draft = backend.place_head(random_head(shape), target) if shape else draft
    model = Model(name, target, load_tokenizer(mini.path("mini")), backend, draft)
    require_exact(model, speculation)
    return model


def read_text(file: Path) -> str:
    """A UTF-8 text file that a user named. Raises UserError."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"cannot read {file} as UTF-8 text: {problem}") from None


def check_folder(folder: Path, option: str = "--out") -> None:
    """Make sure that results can be written, before the work: try it. Raises UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            file.write(b"specdec")
            file.flush()
    except OSError as problem:
        raise UserError(
            f"{option}: cannot write to {folder} ({problem.strerror}): name another folder"
        ) from None


def check_file(file: Path, option: str) -> None:
    """The same for one file. Raises UserError."""
    if file.is_dir():
        raise UserError(f"{option}: {file} is a folder: name a file")
    if file.exists() and not os.access(file, os.W_OK):
        raise UserError(f"{option}: {file} may not be written: name another file")
    check_folder(file.parent, option)


def require_exact(model: Model, speculation: SpeculationConfig) -> None:
    """Refuse programs whose rows depend on their place, their neighbours or the loop: proved on
    the device at hand, unless they are exact by construction."""
    if model.backend.exact(model.target):
        return
    with working(console, "proving that rows do not depend on their place"):
        failed = [c.question for c in model.backend.self_check(model.target) if not c.passed]
        if loop_of(model, speculation) == "device" and not _same_in_both_loops(model, speculation):
            failed.append("the loop that drives the cycles")
    if failed:
        raise UserError(
            f"on this device results depend on: {'; '.join(failed)}. Output would not be "
            "lossless; try --slots 1, --loop host or --dtype float32, and see `specdec doctor`"
        )


def _same_in_both_loops(model: Model, speculation: SpeculationConfig) -> bool:
    """The device loop compiles programs of its own: compare their texts with the host loop's."""
    texts = []
    for loop in ("host", "device"):
        engine = make_engine(model, replace(speculation, loop=loop))
        for sampling in VARIANTS:
            prompts = [[2 + i, 3, 4] * 4 for i in range(min(model.target.slots, PROVEN_ROWS))]
            seqs = [Sequence(p, sampling, max_tokens=WARM_TOKENS) for p in prompts]
            engine.run_to_end(seqs)
            texts.append([seq.tokens for seq in seqs])
    return texts[: len(VARIANTS)] == texts[len(VARIANTS) :]


def loop_of(model: Model, speculation: SpeculationConfig) -> Literal["host", "device"]:
    """The one that was asked for, or the faster."""
    return speculation.loop or model.backend.loop(model.target)


def make_engine(
    model: Model,
    config: SpeculationConfig,
    max_waiting: int = 256,
    accepted: Array | None = None,
) -> Engine:
    """The engine on this model's target, with the drafter and loop that were asked for.

    accepted: counts to take instead of comparing, see specdec.synthetic (speed tests only).
    """
    from drafters.none import NoDrafter

    target, drafter = model.target, make_drafter(config, model)
    k = 0 if config.drafter == "none" and accepted is None else config.k
    if loop_of(model, config) == "device":
        driver = model.backend.cycle(target, drafter, k, accepted)
        # who has no prompts to read looks at the device's own history: nothing to do on the host
        return Engine(target, drafter if config.drafts else NoDrafter(), driver, max_waiting)
    driver = host_cycle(target, drafter, k)
    driver = driver if accepted is None else synthetic_cycle(driver, accepted)
    return Engine(target, drafter, driver, max_waiting)


def warm_up(
    engine: Engine, samplings: Iterable[Sampling], rows: int = 1, lengths: Iterable[int] = (1,)
) -> None:
    """Compile what these requests will need, so that speed is measured without it.

    rows: every batch up to this many is decoded; lengths: prompts to prefill.
    """
    with working(console, "compiling"):
        for sampling in samplings:
            # one row joins per turn, so the first must last until the last is there
            _decode(engine, [[2]] * rows, replace(sampling, seed=0), WARM_TOKENS + rows)
        for length in lengths:
            _decode(engine, [[2] * length], Sampling(), WARM_TOKENS)
    engine.acceptance = Acceptance()


def start(
    config: ModelConfig, speculation: SpeculationConfig, max_waiting: int = 256
) -> tuple[Model, Engine]:
    """Everything that a server does before its first request, which then compiles nothing."""
    model = load_model(config, speculation)
    say_model(config, model)
    engine = make_engine(model, speculation, max_waiting)
    warm_up(engine, VARIANTS, *model.backend.warm(model.target))
    return model, engine


def say_compiled(backend: Backend) -> None:
    """Tell what the cache of compiled programs was worth, where anybody counts."""
    counts = backend.compiled()
    if counts is not None:
        console.print(f"[dim]programs: {counts[0]} from the cache, {counts[1]} compiled[/dim]")


def _decode(engine: Engine, prompts: list[list[int]], sampling: Sampling, count: int) -> None:
    engine.run_to_end([Sequence(list(p), sampling, max_tokens=count) for p in prompts])


def command_record(command: str, model: ModelConfig, **configs: Any) -> dict[str, Any]:
    """The run's record, with the command and its resolved configuration."""
    resolved = {name: _plain(asdict(value)) for name, value in {"model": model, **configs}.items()}
    return run_record(backend_of(model).device(model), command=command, config=resolved)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no paths."""
    return {name: str(v) if isinstance(v, Path) else v for name, v in values.items()}


def print_json(document: dict[str, Any]) -> None:
    """The one JSON document that ends stdout."""
    print(json.dumps(document))


def say_model(config: ModelConfig, model: Model) -> None:
    """Tell who runs where; who typed no model should know that it is the small one."""
    device = model.backend.device(config)
    embedded = " (embedded; --model PATH runs another)" if config.model == "mini" else ""
    console.print(f"[dim]model {model.name}{embedded} on {device}[/dim]")
