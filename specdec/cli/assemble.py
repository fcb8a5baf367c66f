"""From configuration to a running engine: checkpoint, target, drafter, loop."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from specdec.cli.config import ModelConfig, SpeculationConfig
from specdec.cycle import host_cycle
from specdec.engine import Engine
from specdec.errors import UserError
from specdec.record import run_record
from specdec.stats import Acceptance
from specdec.types import Sampling, Sequence

if TYPE_CHECKING:
    from targets.jax.load import JaxOptions
    from targets.jax.target import JaxTarget
    from targets.tokenizer import Tokenizer

console = Console(stderr=True, highlight=False)
"""People read stderr; stdout carries text and, last, JSON."""
WARM_TOKENS = 12
"""Enough for a prefill and one dispatch of either loop."""
VARIANTS = tuple(Sampling(temperature=t, logprobs=n, seed=1) for t in (0.0, 1.0) for n in (None, 0))
"""One request for each variant of the compiled programs."""


@dataclass(frozen=True)
class Model:
    """A loaded checkpoint with its tokenizer."""

    name: str
    target: JaxTarget
    tokenizer: Tokenizer


def load_model(config: ModelConfig, speculation: SpeculationConfig, prove: bool = True) -> Model:
    """Load and prove exactness where it isn't given by construction. Raises UserError.

    prove: False where nothing is decoded, and for the doctor, who reports instead of refusing.
    """
    import targets
    from targets.arch import read_arch
    from targets.tokenizer import load_tokenizer

    path = checkpoint_path(config.model)
    arch = read_arch(path)
    tokenizer = load_tokenizer(path, arch.vocab)
    options = jax_options(config, speculation)
    with console.status(f"loading {path.name}"):
        target = targets.load(path, config.backend, options, tokenizer.suppress_ids)
    model = Model(path.name, target, tokenizer)
    if prove:
        require_exact(model, speculation)
    return model


def jax_options(config: ModelConfig, speculation: SpeculationConfig) -> JaxOptions:
    from targets.jax.load import JaxOptions

    return JaxOptions(
        slots=config.slots,
        max_len=config.max_len,
        k=speculation.k,
        dtype=config.dtype,
        int8=config.int8,
        tp=config.tp,
    )


def read_text(file: Path) -> str:
    """A UTF-8 text file that a user named. Raises UserError."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"cannot read {file} as UTF-8 text: {problem}") from None


def check_folder(folder: Path) -> None:
    """Make sure that results can be written, before the work. Raises UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UserError(f"--out: cannot write to {folder}: {problem.strerror}") from None


def checkpoint_path(model: str) -> Path:
    """A folder, or the embedded model of that name."""
    from targets import mini

    if model in mini.NAMES:
        return mini.path(model)
    path = Path(model)
    if not path.is_dir():
        raise UserError(
            f"no checkpoint folder {model!r}: download one from Hugging Face, or use "
            f"{' or '.join(mini.NAMES)}, which come with specdec"
        )
    return path


def require_exact(model: Model, speculation: SpeculationConfig) -> None:
    """Refuse compiled programs whose rows depend on their place, their neighbours or the loop.

    Mapped rows (CPU) are one program by construction; elsewhere it is proved on the device.
    """
    from targets.jax.selfcheck import self_check

    if model.target.plan.mapped:
        return
    with console.status("proving that rows do not depend on their place"):
        failed = [check.question for check in self_check(model.target) if not check.passed]
        if speculation.loop == "device" and not _same_in_both_loops(model, speculation):
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
            prompts = [[2 + i, 3, 4] * 4 for i in range(model.target.slots)]
            seqs = [Sequence(p, sampling, max_tokens=WARM_TOKENS) for p in prompts]
            for _ in engine.run(seqs):
                pass
            texts.append([seq.tokens for seq in seqs])
    return texts[: len(VARIANTS)] == texts[len(VARIANTS) :]


def make_engine(model: Model, config: SpeculationConfig, max_waiting: int = 256) -> Engine:
    """The engine on this model's target, with the drafter and loop that were asked for."""
    from drafters.ngram import NgramDrafter
    from drafters.none import NoDrafter

    target, on_device = model.target, config.loop == "device"
    ngram = config.drafter == "ngram"
    drafter = NgramDrafter(config.ngram_min, config.ngram_max) if ngram else NoDrafter()
    if not on_device:
        return Engine(target, drafter, host_cycle(target, drafter, config.k), max_waiting)
    from drafters.device_cycle_jax import device_cycle
    from drafters.ngram_jax import TracedNgram, TracedNone

    traced = TracedNgram(config.ngram_min, config.ngram_max) if ngram else TracedNone()
    # the traced drafter reads the device's own history: the engine's has nothing to do
    return Engine(target, NoDrafter(), device_cycle(target, traced, config.k), max_waiting)


def warm_up(engine: Engine, samplings: Iterable[Sampling]) -> None:
    """Compile what these requests will need, so that speed is measured without it."""
    with console.status("compiling"):
        for sampling in samplings:
            seq = Sequence([2], replace(sampling, seed=0), max_tokens=WARM_TOKENS)
            for _ in engine.run([seq]):
                pass
    engine.acceptance = Acceptance()


def command_record(command: str, **configs: Any) -> dict[str, Any]:
    """The run's record, with the command and its resolved configuration."""
    import jax

    device = f"{jax.default_backend()}: {jax.devices()[0].device_kind}"
    resolved = {name: asdict(value) for name, value in configs.items()}
    return run_record(device, command=command, config=resolved)


def print_json(document: dict[str, Any]) -> None:
    """The one JSON document that ends stdout."""
    print(json.dumps(document))


def say_model(config: ModelConfig, model: Model) -> None:
    """Tell who runs where; who typed no model should know that it is the small one."""
    import jax

    device = jax.devices()[0].device_kind
    embedded = " (embedded; --model PATH runs another)" if config.model == "mini" else ""
    console.print(f"[dim]model {model.name}{embedded} on {jax.default_backend()} ({device})[/dim]")
