"""Perplexity of mini by the format of its weights: written by the compressed-tensors library, read
by specdec, computed in float32.

    PYTHONPATH=. python docs/log/formats.py TEXT OUT.json
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from targets import mini
from targets.checkpoint import Checkpoint
from targets.model_folder import read_arch
from targets.stored import dequantise
from tests.four_bits import SCHEMES, write_folder

WINDOW = ["--window", "256", "--stride", "128", "--json"]


def perplexity(text: str, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "specdec", "perplexity", text, *WINDOW, *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def written(source: Path, folder: Path, scheme: str) -> Path:
    """mini in this scheme, with its tokenizer."""
    checkpoint = Checkpoint(source, read_arch(source))
    tensors = {name: dequantise(checkpoint.read(name)) for name in checkpoint.specs}
    config = json.loads((source / "config.json").read_text())
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja", ".model") and "index" not in file.name:
            folder.mkdir(exist_ok=True)
            shutil.copy(file, folder)
    write_folder(folder, config, tensors, scheme)
    return folder


def main() -> None:
    text, out = sys.argv[1:]
    source = mini.checkpoint_path("mini")
    found = {
        "as it is (bfloat16)": perplexity(text),
        "int8 on load": perplexity(text, "--int8"),
        "int4 on load": perplexity(text, "--dtype", "int4"),
    }
    with tempfile.TemporaryDirectory() as root:
        for number, scheme in enumerate(SCHEMES):
            folder = written(source, Path(root) / str(number), scheme)
            found[scheme] = perplexity(text, "--model", str(folder))
            print(f"{scheme}: {found[scheme]}", file=sys.stderr, flush=True)
    Path(out).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
