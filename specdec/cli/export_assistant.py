"""`specdec export-assistant`: a trained assistant in transformers' form."""

from __future__ import annotations

from pathlib import Path

from specdec.cli import topics, training
from specdec.cli.console import check_folder
from specdec.cli.distil import require_training
from targets.mini import checkpoint_path


def export_assistant(
    run: Path,
    /,
    *,
    out: training.Out,
    model: training.Target = "mini",
    dtype: training.Stored = "bfloat16",
    json: topics.Json = False,
) -> None:
    """Write an assistant's folder from a run's newest checkpoint.

    Parameters
    ----------
    run
        The folder that `specdec train-assistant` made.
    """
    require_training()
    from drafters.assistant.files import load_assistant, save_assistant
    from targets.model_folder import read_arch
    from training.trained import trained_assistant

    check_folder(out)
    path = checkpoint_path(model)
    assistant, step = trained_assistant(run, path)
    save_assistant(assistant, out, dtype)
    load_assistant(out, read_arch(path))  # what was written is what is loaded
    training.say_exported(out, step, json)
