"""A target's folder with what speculators reads of one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.support.tiny import config_of


def write_verifier(path: Path, table: np.ndarray) -> None:
    """Write the parts of a target that speculators reads: its embedding, final norm and config."""
    vocab, hidden = table.shape
    text_config = config_of("31b")["text_config"] | {
        "hidden_size": hidden,
        "vocab_size": vocab,
        "architectures": ["Gemma4ForCausalLM"],
    }
    path.mkdir()
    (path / "config.json").write_text(json.dumps(text_config))
    stored = {"model.embed_tokens.weight": table, "lm_head.weight": table}
    save_file(
        stored | {"model.norm.weight": np.ones(hidden, np.float32)}, path / "model.safetensors"
    )
