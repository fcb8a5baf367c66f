"""Tokens per verify pass where a file is repeated with edits: prompt lookup, suffix lookup, and
the file as a predicted output. No model is asked: the answer is given, and what would be accepted
of each guess is counted.

    python docs/log/edits.py OUT.json       # 50 modules of Python's library, 5 % of lines changed
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from drafters.lookup.host import LookupTwin
from drafters.ngram.host import NgramDrafter
from drafters.none.host import NoDrafter
from drafters.suffix.host import SHORTEST, SuffixDrafter
from drafters.suffix.kind import LONGEST
from specdec.core.constraint import GuidedDrafter
from specdec.core.prediction import PredictedText, Prediction
from specdec.core.protocols import Drafter
from specdec.core.types import Sequence
from targets import mini
from targets.tokenizer import Tokenizer, load_tokenizer

LINES = range(60, 250)
ASK = "Here is a file:\n{file}\nEdit it as asked and answer with the whole file.\n"


class Case(NamedTuple):
    prompt: list[int]
    answer: list[int]
    file: list[int]


def edited(lines: list[str], share: float, chance: random.Random) -> list[str]:
    """A share of the lines with another name in it, left out, or with a new one after it."""
    out: list[str] = []
    changed = set(chance.sample(range(len(lines)), max(1, int(share * len(lines)))))
    for number, line in enumerate(lines):
        edit = chance.choice(("rename", "insert", "delete")) if number in changed else None
        names = [
            word for word in line.replace("(", " ").replace(".", " ").split() if word.isalpha()
        ]
        if edit == "rename" and names:
            name = chance.choice(names)
            line = line.replace(name, f"{name}_{chance.randrange(99)}")
        if edit != "delete":
            out.append(line)
        if edit == "insert":
            indent = line[: len(line) - len(line.lstrip())]
            out.append(f"{indent}check({chance.randrange(999)})")
    return out


def cases(count: int, share: float, tokenizer: Tokenizer) -> Iterator[Case]:
    chance = random.Random(0)
    texts = (path.read_text(errors="replace") for path in modules())
    files = [lines for text in texts if len(lines := text.splitlines()) in LINES]
    for lines in chance.sample(files, count):
        file = "\n".join(lines)
        answer = tokenizer.encode("\n".join(edited(lines, share, chance)))[1:]
        yield Case(tokenizer.encode(ASK.format(file=file)), answer, tokenizer.encode(file)[1:])


def modules() -> list[Path]:
    """Of Python's library, without what was installed beside it, and tests."""
    own = Path(sysconfig.get_path("stdlib"))
    paths = (path for path in sorted(own.rglob("*.py")) if "site-packages" not in path.parts)
    return [path for path in paths if "test" not in str(path.relative_to(own))]


class Counts(NamedTuple):
    cycles: int
    repeated: int
    """Tokens of the file that were found in the answer."""


def counted(case: Case, drafter: Drafter, k: int, predicted: bool) -> Counts:
    seq = Sequence(list(case.prompt))
    seq.slot, cycles, at = 0, 0, 1
    drafter.reset(seq)
    if predicted:
        seq.prediction = Prediction(PredictedText(case.file), seq.prompt_len)
    seq.tokens.append(case.answer[0])  # prefill's
    guided = GuidedDrafter(drafter)
    while at < len(case.answer):
        guess = np.asarray(guided.propose([seq], k).tokens)[0]
        coming = np.array(case.answer[at : at + k])
        agreed = int((np.cumprod(guess[: len(coming)] == coming)).sum())
        seq.tokens += case.answer[at : at + agreed + 1]
        at, cycles = at + agreed + 1, cycles + 1
    if seq.prediction is None:
        return Counts(cycles, 0)
    seq.prediction.read(seq.tokens)
    return Counts(cycles, seq.prediction.accepted)


DEVICE_SUFFIX = "suffix in device loops"
device_suffix = partial(LookupTwin, SHORTEST, LONGEST)
WAYS: dict[str, tuple[Callable[[], Drafter], bool]] = {
    "ngram": (NgramDrafter, False),
    "suffix": (SuffixDrafter, False),
    DEVICE_SUFFIX: (device_suffix, False),
    "predicted": (NoDrafter, True),
    "predicted, ngram": (NgramDrafter, True),
    "predicted, suffix": (SuffixDrafter, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--files", type=int, default=50)
    parser.add_argument("--share", type=float, default=0.05, help="of lines that are changed")
    parser.add_argument("--ks", default="3,4,7,15,31")
    options = parser.parse_args()
    known = list(cases(options.files, options.share, load_tokenizer(mini.path("mini"))))
    answered, held = sum(len(c.answer) - 1 for c in known), sum(len(c.file) for c in known)
    table: dict[str, dict[str, float]] = {}
    for k in map(int, options.ks.split(",")):
        row = table[f"k {k}"] = {}
        for name, (make, predicted) in WAYS.items():
            found = [counted(case, make(), k, predicted) for case in known]
            row[name] = round(answered / sum(c.cycles for c in found), 3)
            if predicted and make is NoDrafter:
                row["of the file repeated"] = round(sum(c.repeated for c in found) / held, 4)
        print(k, row, flush=True)
    about = {"files": options.files, "lines changed": options.share, "tokens": answered}
    options.out.write_text(json.dumps(about | {"tau": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
