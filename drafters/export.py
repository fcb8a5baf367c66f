"""A draft model's folder, written so that other engines read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from specdec.core.errors import UserError


def write_folder(
    out: Path, config: dict[str, Any], stored: dict[str, np.ndarray], what: str
) -> None:
    """config.json and model.safetensors, beside and renamed, so that neither file is ever half.
    what: is written, for the UserError on a full disk."""
    weights, description = out / "partial.safetensors", out / "partial.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
        save_file(stored, weights, metadata={"format": "pt"})
        weights.chmod(0o644)  # the library writes it for its owner only
        description.write_text(json.dumps(config, indent=1) + "\n")
        weights.rename(out / "model.safetensors")
        description.rename(out / "config.json")
    except (OSError, SafetensorError) as problem:
        raise UserError(f"cannot write the {what} to {out}: {problem}") from None
