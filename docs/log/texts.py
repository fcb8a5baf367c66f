"""Texts for `specdec bench --script` on a card, as token ids: files with edits and the file as
prediction (edits.jsonl), and random words (words.jsonl).

    PYTHONPATH=. python docs/log/texts.py FOLDER
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from edits import cases  # noqa: E402

from targets import mini  # noqa: E402
from targets.tokenizer import load_tokenizer  # noqa: E402

FILES = 50
SHARE = 0.05
EDITS = 8
WORDS = 4
Row = dict[str, list[int]]


def edits() -> Iterable[Row]:
    known = cases(FILES, SHARE, load_tokenizer(mini.path("mini")))
    for case in islice(known, EDITS):
        yield {"prompt": case.prompt, "answer": case.answer, "prediction": case.file}


def words(rows: int, chance: random.Random, **lengths: int) -> Iterable[Row]:
    for _ in range(rows):
        yield {
            part: [chance.randrange(3, 4000) for _ in range(length)]
            for part, length in lengths.items()
        }


def useless(rows: int) -> list[Row]:
    """With a prediction that is never right."""
    return list(words(rows, random.Random(1), prompt=64, answer=129, prediction=200))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder, chance = parser.parse_args().folder, random.Random(1)
    made = {
        "edits": edits(),
        "words": words(WORDS, chance, prompt=512, answer=513),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in made.items():
        lines = (json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
