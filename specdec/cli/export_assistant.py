"""`specdec export-assistant`: a trained assistant in transformers' form."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from specdec.cli.console import check_folder, console, print_json
from specdec.cli.distil import require_training
from targets.mini import checkpoint_path


def export_assistant(
    run: Path,
    /,
    *,
    out: Path,
    model: str = "mini",
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    json: bool = False,
) -> None:
    """Write an assistant's folder from a run's newest checkpoint.

    Parameters
    ----------
    run
        The folder that `specdec train-assistant` made.
    out
        Folder for config.json and model.safetensors.
    model
        The target that it was trained for.
    dtype
        Of the weights.
    json
        End stdout with one JSON document.
    """
    require_training()
    from drafters.assistant.files import load_assistant, save_assistant
    from targets.arch import read_arch
    from training.trained import trained_assistant

    check_folder(out)
    path = checkpoint_path(model)
    assistant, step = trained_assistant(run, path)
    save_assistant(assistant, out, dtype)
    load_assistant(out, read_arch(path))  # what was written is what is loaded
    size = (out / "model.safetensors").stat().st_size
    console.print(f"wrote step {step} to {out} ({size / 2**20:.1f} MiB)")
    if json:
        print_json({"step": step, "bytes": size, "out": str(out)})
