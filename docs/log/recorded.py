"""What `recording.py` wrote, as texts for `choosing.py`: by temperature, drafter and category."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specdec.core.script import recorded_right
from specdec.evaluation.prompts import read_prompts
from targets import mini
from targets.tokenizer import load_tokenizer

SWITCHES = (("coding", "translation"), ("rag", "roleplay"))
"""Categories between which a text changes in its middle."""


class Text(NamedTuple):
    """right: how many guesses of the drafter with weights are right from each token on."""

    prompt: list[int]
    answer: list[int]
    right: np.ndarray

    def then(self, other: Text, most: int | None = None) -> Text:
        """This one's first `most` tokens, and the other behind them."""
        right = np.concatenate([self.right[:most], other.right])
        return Text(self.prompt, self.answer[:most] + other.answer, right)


def kinds_of(folder: Path, prompts: Path) -> Iterator[tuple[str, list[Text]]]:
    """prompts: the file that was recorded with, for lookup reads them too."""
    tokenizer = load_tokenizer(mini.path("mini"))
    asked = {
        (p.id, p.category): p.encode(tokenizer.encode, tokenizer.encode_chat)
        for p in read_prompts(prompts)
    }
    for file in sorted(folder.glob("t*.jsonl")):
        found: dict[tuple[str, str], list[Text]] = defaultdict(list)
        for line in file.read_text().splitlines():
            row = json.loads(line)
            prompt = asked[row["id"], row["category"]]
            for drafter, told in row["recorded"]["right"].items():
                text = Text(prompt, row["answer"], recorded_right(told))
                found[drafter, row["category"]].append(text)
        for (drafter, category), texts in found.items():
            yield f"{drafter}, T = {file.stem[1:]}, {category}", texts
        for drafter in sorted({drafter for drafter, _ in found}):
            for first, then in SWITCHES:
                pairs = zip(found[drafter, first], found[drafter, then], strict=False)
                both = [a._replace(prompt=a.prompt + b.prompt).then(b) for a, b in pairs]
                if not both:
                    continue
                yield f"{drafter}, T = {file.stem[1:]}, {first}, then {then}", both
