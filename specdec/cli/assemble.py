"""From configuration to a running engine: checkpoint, target, drafter, loop."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from specdec import __version__
from specdec.cli.config import ModelConfig, SpeculationConfig
from specdec.cycle import host_cycle
from specdec.engine import Engine
from specdec.errors import UserError
from specdec.types import Sampling, Sequence

if TYPE_CHECKING:
    from targets.jax.load import JaxOptions
    from targets.jax.target import JaxTarget
    from targets.tokenizer import Tokenizer

console = Console(stderr=True, highlight=False)
"""People read stderr; stdout carries text and, last, JSON."""
WARM_TOKENS = 12
"""Enough for a prefill and one dispatch of either loop."""


@dataclass(frozen=True)
class Model:
    """A loaded checkpoint with its tokenizer."""

    name: str
    path: Path
    target: JaxTarget
    tokenizer: Tokenizer


def load_model(config: ModelConfig, speculation: SpeculationConfig, prove: bool = True) -> Model:
    """Load and prove exactness where it isn't given by construction. Raises UserError.

    prove: False for the doctor, who reports a failed proof instead of refusing.
    """
    import targets
    from targets.arch import read_arch
    from targets.jax.load import width_for
    from targets.tokenizer import load_tokenizer

    width_for(speculation.k)
    path = checkpoint_path(config.model)
    arch = read_arch(path)
    tokenizer = load_tokenizer(path, arch.vocab)
    options = jax_options(config, speculation)
    with console.status(f"loading {path.name}"):
        target = targets.load(path, config.backend, options, tokenizer.suppress_ids)
    if prove and not target.plan.mapped:
        require_exact(target)
    return Model(path.name, path, target, tokenizer)


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


def require_exact(target: JaxTarget) -> None:
    """Refuse to serve from a compiled program whose rows depend on their place or neighbours."""
    from targets.jax.selfcheck import self_check

    with console.status("proving that rows do not depend on their place"):
        failed = [check.question for check in self_check(target) if not check.passed]
    if failed:
        raise UserError(
            f"on this device results depend on: {'; '.join(failed)}. Output would not be "
            "lossless; try --slots 1 or --dtype float32, and see `specdec doctor`"
        )


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


def warm_up(engine: Engine, samplings: list[Sampling]) -> None:
    """Compile what these requests will need, so that speed is measured without it."""
    with console.status("compiling"):
        for sampling in samplings:
            seq = Sequence([2, 2, 2], replace(sampling, seed=0), max_tokens=WARM_TOKENS)
            for _ in engine.run([seq]):
                pass
    engine.acceptance = type(engine.acceptance)()


def run_record(command: str, **configs: Any) -> dict[str, Any]:
    """What is stored beside each output: argv, code and library versions, device, config."""
    import jax

    return {
        "command": command,
        "argv": sys.argv,
        "specdec": __version__,
        "git": _git_sha(),
        "versions": versions(),
        "device": f"{jax.default_backend()}: {jax.devices()[0].device_kind}",
        "config": {name: asdict(value) for name, value in configs.items()},
    }


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in ("jax", "jaxlib", "numpy", "safetensors", "tokenizers", "libtpu", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _git_sha() -> str | None:
    here = Path(__file__).parent
    done = subprocess.run(
        ["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None


def print_json(document: dict[str, Any]) -> None:
    """The one JSON document that ends stdout."""
    print(json.dumps(document))


def say_model(config: ModelConfig, model: Model) -> None:
    """Tell who runs where; who typed no model should know that it is the small one."""
    import jax

    device = jax.devices()[0].device_kind
    embedded = " (embedded; --model PATH runs another)" if config.model == "mini" else ""
    console.print(f"[dim]model {model.name}{embedded} on {jax.default_backend()} ({device})[/dim]")
