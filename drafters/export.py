"""A draft model's folder, written so that other engines read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from specdec.core.errors import UserError
from specdec.core.writing import beside


def write_folder(
    out: Path, config: dict[str, Any], stored: dict[str, np.ndarray], what: str
) -> None:
    """config.json and model.safetensors, neither of which is ever half.
    what: is written, for the UserError on a full disk."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with (
            beside(out / "config.json") as description,  # whose place it takes last
            beside(out / "model.safetensors") as weights,
        ):
            save_file(stored, weights, metadata={"format": "pt"})
            description.write_text(json.dumps(config, indent=1) + "\n")
    except (OSError, SafetensorError) as problem:
        raise UserError(f"cannot write the {what} to {out}: {problem}") from None
