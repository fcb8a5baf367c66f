"""`specdec export-eagle3`: a trained head in the forms that engines load."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from specdec.cli import topics, training
from specdec.cli.console import check_folder
from specdec.cli.distil import require_training
from targets.mini import checkpoint_path


def export_eagle3(
    run: Path,
    /,
    *,
    out: training.Out,
    model: training.Target = "mini",
    form: Literal["flat", "speculators"] = "flat",
    dtype: training.Stored = "bfloat16",
    with_embed: bool = False,
    json: topics.Json = False,
) -> None:
    """Write a head's folder from a run's newest checkpoint.

    Parameters
    ----------
    run
        The folder that `specdec train-eagle3` made.
    form
        flat: vLLM, SGLang, SpecForge and specdec. speculators: speculators and vLLM.
    with_embed
        Put the target's embedding into the flat form too, as SpecForge requires.
    """
    require_training()
    from drafters.eagle3.files import load_head, save_flat, save_speculators
    from targets.checkpoint import Checkpoint
    from targets.model_folder import read_arch
    from targets.stored import dequantise
    from targets.tokenizer import load_tokenizer
    from training.trained import trained_head

    check_folder(out)
    path = checkpoint_path(model)
    arch = read_arch(path)
    stop_ids = load_tokenizer(path, arch.vocab).stop_ids
    head, step, unroll = trained_head(run, path)
    embedding = None
    if with_embed or form == "speculators":
        embedding = dequantise(Checkpoint(path, arch).read("embed_tokens"))
    if form == "flat":
        save_flat(head, out, stop_ids, dtype, embedding)
    else:
        assert embedding is not None
        save_speculators(head, out, stop_ids, path, embedding, unroll, dtype)
    load_head(out, arch)  # what was written is what is loaded
    training.say_exported(out, step, json, form)
