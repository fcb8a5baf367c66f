"""`specdec export-dflash`: a trained block drafter in the form of speculators and vLLM."""

from __future__ import annotations

from pathlib import Path

from specdec.cli import topics, training
from specdec.cli.console import check_folder
from specdec.cli.distil import require_training
from targets.mini import checkpoint_path


def export_dflash(
    run: Path,
    /,
    *,
    out: training.Out,
    model: training.Target = "mini",
    dtype: training.Stored = "bfloat16",
    json: topics.Json = False,
) -> None:
    """Write a block drafter's folder from a run's newest checkpoint.

    Parameters
    ----------
    run
        The folder that `specdec train-dflash` made.
    """
    require_training()
    from drafters.dflash.files import load_head, save_dspark
    from targets.model_folder import read_arch
    from targets.tokenizer import load_tokenizer
    from training.trained import trained_block

    check_folder(out)
    path = checkpoint_path(model)
    arch = read_arch(path)
    head, step = trained_block(run, path)
    save_dspark(head, out, load_tokenizer(path, arch.vocab).stop_ids, str(path), dtype)
    load_head(out, arch)  # what was written is what is loaded
    training.say_exported(out, step, json)
