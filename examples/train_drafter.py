"""An EAGLE-3 head for `mini`, from the model's own answers to what tau it is worth: about a minute
on a CPU, and so few steps that it is worth little. docs/guide/train.md trains one that is good."""

import json
import sys
import tempfile
from pathlib import Path

from specdec.cli import main as specdec

RECIPE = Path(__file__).with_name("train_drafter.toml")
NAMES = "first", "last", "total", "largest", "reverse", "count", "unique", "flatten"


def run(*arguments: str | Path) -> None:
    """As a command line, which is what to type in a terminal."""
    print(f"\n$ specdec {' '.join(map(str, arguments))}", flush=True)
    specdec([str(argument) for argument in arguments])


def main(folder: str = "") -> None:
    """The folder keeps what is made; the same call goes on where it was stopped."""
    with tempfile.TemporaryDirectory() as own:
        kept = Path(folder or own)
        prompts = kept / "prompts.jsonl"
        kept.mkdir(exist_ok=True)
        lines = [json.dumps({"prompt": f"def {name}(items):\n"}) for name in NAMES]
        prompts.write_text("\n".join(lines) + "\n")
        data, trained, head = kept / "data", kept / "run", kept / "head"
        short = "--max-tokens", "32", "--max-len", "256"
        run("distil", prompts, "--drafter", "eagle3", *short, "--out", data)
        run("train-eagle3", RECIPE, "--data", data, "--run", trained)
        run("export-eagle3", trained, "--out", head)
        run("eval-acceptance", prompts, "--drafter", "eagle3", "--draft-model", head, *short)


if __name__ == "__main__":
    main(*sys.argv[1:])
