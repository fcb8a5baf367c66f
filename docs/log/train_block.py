"""A block drafter for mini, from source at hand to a table of tau, on one GPU.

    PYTHONPATH=. python docs/log/train_block.py OUT --humaneval humaneval.jsonl --steps 6800

Permissively licensed Python source of this machine is split as mini's own corpus was. mini answers
pieces of one side, `train-dflash` learns from the answers, and `eval-acceptance` measures the head
on HumanEval's prompts and on the beginnings of files of the other side. Each part is skipped whose
folder is there already, and `train-dflash` continues: the same command does.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from recipes.mini.corpus import fault, installed_packages, is_heldout, read, standard_library
from recipes.mini.similarity import content_key

HERE = Path(__file__).parents[2]
RECIPE = HERE / "configs" / "dspark-mini.toml"
FILES = 16_000
"""Source files that are looked at."""
TEXTS = 82
"""Texts that the head is measured on, of each kind."""
BEGINNING = 600
"""Characters of a file's beginning."""
ANSWER = 128
"""Tokens of each answer that the head is measured on."""
SAMPLING = ("--temperature", "1", "--top-p", "1", "--top-k", "0")


def look(path: Path) -> tuple[str, str] | None:
    """A file's text and its key, None where it is unfit."""
    text = read(path)
    return None if text is None or fault(text) else (content_key(text), text)


def write_source(out: Path) -> None:
    """`train.jsonl`, and `source.jsonl` with beginnings of held-out files."""
    packages = [standard_library(), *installed_packages()[0]]
    files = [file for package in packages for file in package.files]
    random.Random(0).shuffle(files)
    with ProcessPoolExecutor() as pool:
        found = dict(filter(None, pool.map(look, files[:FILES], chunksize=64)))
    sides: tuple[list[str], list[str]] = ([], [])
    for key, text in found.items():
        sides[is_heldout(key)].append(text)
    train = "".join(json.dumps({"text": text}) + "\n" for text in sides[0])
    held = "".join(json.dumps(text[:BEGINNING]) + "\n" for text in sides[1][:TEXTS])
    (out / "train.jsonl").write_text(train)
    (out / "source.jsonl").write_text(held)
    print(f"{len(sides[0])} files to train on, {len(sides[1])} held out", flush=True)


def prompts_of(out: Path, processes: int) -> list[Path]:
    """Prompts in as many files, in a random order."""
    whole = out / "prompts.jsonl"
    run("-m", "recipes.mini.draft_prompts", out / "train.jsonl", whole)
    lines = whole.read_text().splitlines()
    random.Random(1).shuffle(lines)
    parts = [out / f"prompts-{number}.jsonl" for number in range(processes)]
    for number, part in enumerate(parts):
        part.write_text("\n".join(lines[number::processes]) + "\n")
    return parts


def distil(out: Path, answers: int, processes: int) -> list[Path]:
    """Folders of answers: mini leaves a GPU idle unless several processes share it."""
    folders = [out / f"answers-{number}" for number in range(processes)]
    own = "--backend cuda --slots 256 --max-len 512 --drafter none --cut 96 --max-tokens 208"
    rest = (*own.split(), *SAMPLING, "--shard-rows", "1000", "--limit", answers // processes)
    pairs = zip(prompts_of(out, processes), folders, strict=True)
    made = [start("-m", "specdec", "distil", p, "--out", f, *rest) for p, f in pairs]
    assert not any(process.wait() for process in made)  # what a kill left is continued
    return folders


def train(out: Path, folders: list[Path], steps: int) -> None:
    recipe = RECIPE.read_text()
    own = {"steps": steps, "evaluate_every": max(1, steps // 4)}
    for key, value in own.items():
        recipe = re.sub(rf"^{key} = \d+", f"{key} = {value}", recipe, flags=re.MULTILINE)
    (out / "recipe.toml").write_text(recipe)
    data = [word for folder in folders for word in ("--data", folder)]
    run("-m", "specdec", "train-dflash", out / "recipe.toml", *data, "--run", out / "run")
    run("-m", "specdec", "export-dflash", out / "run", "--out", out / "block")


def table(out: Path, humaneval: Path) -> None:
    for name, prompts in (("HumanEval", humaneval), ("source", out / "source.jsonl")):
        for k in (3, 7):
            folder = out / f"{name}-{k}"
            own = "--backend cuda --dtype bfloat16 --slots 8 --drafter dspark"
            numbers = "--k", k, "--limit", TEXTS, "--max-tokens", ANSWER
            command = "-m", "specdec", "eval-acceptance", prompts, "--draft-model", out / "block"
            run(*command, *own.split(), *numbers, *SAMPLING, "--out", folder)


def start(*words: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, *map(str, words)], cwd=HERE)


def run(*words: object) -> None:
    began = time.perf_counter()
    assert start(*words).wait() == 0, words
    print(f"{time.perf_counter() - began:.0f} s: {' '.join(map(str, words[:5]))}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--humaneval", type=Path, required=True)
    parser.add_argument("--answers", type=int, default=36_000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6_800)
    asked = parser.parse_args()
    out = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "source.jsonl").is_file():
        write_source(out)
    folders = distil(out, asked.answers, asked.processes)
    train(out, folders, asked.steps)
    table(out, asked.humaneval.resolve())


if __name__ == "__main__":
    main()
