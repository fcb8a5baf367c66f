"""Writes a checkpoint that takes pictures, out of `mini` and a random image side: for trying and
testing what pictures meet on their way, without a download.

    python tools/seeing_mini.py /tmp/seeing && specdec serve --model /tmp/seeing

What it says about a picture means nothing; that it says the same with any drafter does.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from targets import mini
from targets.vision.spec import PROJECTOR, VisionSpec, read_vision
from targets.vision.tensors import vision_tensors

PICTURE_TOKENS = ("<|image>", "<|image|>", "<image|>")
"""Control tokens before a picture, for it, and behind it, after the last of mini's own."""
PADDED_TO = 8
"""Vocabularies are multiples of this."""
VISION: dict[str, Any] = {
    "model_type": "gemma4_vision",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 1024,
    "default_output_length": 70,
    "use_clipped_linears": False,
    "standardize": True,
}
SHARE = 0.5
"""Size of a picture's rows, in that of words' rows."""


def write(folder: Path, source: Path | None = None) -> Path:
    """Write the checkpoint into `folder`, which must not exist. source: a text checkpoint, mini by
    default."""
    source = source or mini.path("mini")
    shutil.copytree(source, folder)
    text = json.loads((source / "config.json").read_text())
    first = text["vocab_size"]
    text["vocab_size"] = first + PADDED_TO
    text["use_bidirectional_attention"] = "vision"
    config = {
        "model_type": "gemma4",
        "text_config": text,
        "vision_config": VISION,
        "eos_token_id": text["eos_token_id"],
        "boi_token_id": first,
        "image_token_id": first + 1,
        "eoi_token_id": first + 2,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _add_tokens(folder / "tokenizer.json", first)
    _add_tensors(folder, text["hidden_size"])
    return folder


def _add_tokens(file: Path, first: int) -> None:
    tokenizer = json.loads(file.read_text())
    common = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] += [
        {"id": first + i, "content": content, "special": True, **common}
        for i, content in enumerate(PICTURE_TOKENS)
    ]
    file.write_text(json.dumps(tokenizer))


def _add_tensors(folder: Path, hidden: int) -> None:
    """The image side's, and rows of the embedding for the new tokens."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    table = tensors[name]
    tensors[name] = np.concatenate([table, table[:PADDED_TO]])
    projector = f"model.{PROJECTOR}"
    save_file(tensors | {projector: np.zeros(1, np.float32)}, file)  # as `read_vision` wants
    spec = read_vision(folder)
    assert spec is not None
    size = SHARE * float(np.abs(table.astype(np.float32)).mean()) * hidden**0.5
    save_file(tensors | _random(spec, hidden, size), file)


def _random(spec: VisionSpec, hidden: int, size: float) -> dict[str, np.ndarray]:
    """size: of a picture's rows."""
    random = np.random.default_rng(0)
    found = {}
    for name, shape in vision_tensors(spec, hidden).items():
        noise = random.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            value = 0.1 * noise + (0 if name.endswith("bias") else 1)
        else:
            value = noise * np.float32(shape[-1] ** -0.5)
        value = value * np.float32(size if name == PROJECTOR else 1)
        found[f"model.{name}"] = value.astype(ml_dtypes.bfloat16)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a folder that does not exist yet")
    print(write(parser.parse_args().folder))


if __name__ == "__main__":
    main()
