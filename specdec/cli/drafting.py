"""The drafter that was asked for, and the draft model that it may need."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specdec.cli.config import SpeculationConfig
from specdec.errors import UserError
from specdec.protocols import Drafter

if TYPE_CHECKING:
    from drafters.eagle3.spec import Head, HeadSpec
    from specdec.cli.assemble import Model
    from targets.arch import Arch
    from targets.tokenizer import Tokenizer


def checkpoint_path(model: str) -> Path:
    """A folder, or the embedded model of that name. Raises UserError."""
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


def draft_folder(speculation: SpeculationConfig, tokenizer: Tokenizer) -> Path | None:
    """Where the draft model lies, None for drafters that have none. Raises UserError, too for a
    vocabulary that is not the target's: the same id would be another word."""
    from targets.arch import read_arch
    from targets.tokenizer import load_tokenizer

    if speculation.drafter != "model" or speculation.draft_model is None:
        return None
    path = checkpoint_path(speculation.draft_model)
    own = load_tokenizer(path, read_arch(path).vocab)
    if own.vocabulary != tokenizer.vocabulary:
        raise UserError(
            f"--draft-model {path.name} has another vocabulary than the model (sha256 "
            f"{own.vocabulary[:16]}, the model's {tokenizer.vocabulary[:16]}): choose a draft "
            "model with the model's own tokenizer"
        )
    return path


def read_head(speculation: SpeculationConfig, arch: Arch) -> Head | None:
    """The EAGLE-3 head for a target of this architecture, None for other drafters. Raises
    UserError, too for a head of another target."""
    from drafters.eagle3 import embedded
    from drafters.eagle3.files import load_head

    if speculation.drafter != "eagle3" or speculation.draft_model is None:
        return None
    if speculation.draft_model in embedded.NAMES:
        return load_head(embedded.path(speculation.draft_model), arch)
    folder = Path(speculation.draft_model)
    if not folder.is_dir():
        raise UserError(f"no folder {folder}: --draft-model names an EAGLE-3 head's folder")
    return load_head(folder, arch)


def draft_dimensions(speculation: SpeculationConfig) -> Arch | None:
    """Of a public model, as a draft model with random weights; None for drafters without one.
    Raises UserError."""
    from targets import mini
    from targets.arch import released

    if speculation.drafter != "model":
        return None
    if speculation.draft_model in mini.NAMES:
        raise UserError(
            "--random makes the draft model's weights too: name its size, as in --draft-model "
            "gemma-4-e4b"
        )
    return None if speculation.draft_model is None else released(speculation.draft_model)


def head_dimensions(speculation: SpeculationConfig, arch: Arch) -> HeadSpec | None:
    """Of an EAGLE-3 head with random weights for a target of this size; None for other drafters.
    Raises UserError."""
    from drafters.eagle3.spec import sized

    return sized(arch) if speculation.drafter == "eagle3" else None


def make_drafter(config: SpeculationConfig, model: Model) -> Drafter:
    """The drafter on this model's target."""
    from drafters.model.host import ModelDrafter
    from drafters.ngram.host import NgramDrafter
    from drafters.none.host import NoDrafter

    greedy = config.draft_sample_method == "greedy"
    if config.drafter == "ngram":
        return NgramDrafter(config.ngram_min, config.ngram_max)
    if config.drafter == "model":
        return ModelDrafter(model.draft, greedy)
    if config.drafter == "eagle3":
        return model.backend.eagle3(model.draft, model.target, config.k, greedy)
    return NoDrafter()
