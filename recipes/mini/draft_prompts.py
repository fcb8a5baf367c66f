"""Prompts for mini to answer when its EAGLE-3 head's data is distilled.

`python -m recipes.mini.draft_prompts corpus/train.jsonl prompts.jsonl` writes for each document a
piece from somewhere in it (`specdec distil --cut` makes several prompts of it), how some of its
functions begin, and requests for functions. A little of every document: a head trained on all of a
few files would be good at those files only.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from training.chats import chats_of, requests_and_answers

SEED = 0


def prompts_of(
    documents: list[str], characters: int, functions: int
) -> Iterator[dict[str, object]]:
    """For each document: a piece of so many characters, and up to `functions` openings of functions
    and requests for functions."""
    for text in documents:
        yield {"text": excerpt(text, characters), "category": "source"}
        for opening in islice(openings(text), functions):
            yield {"prompt": opening, "category": "opening"}
        for chat in islice(chats_of(text, SEED), functions):
            yield {"messages": [chat[0]], "category": "chat"}


def excerpt(text: str, characters: int) -> str:
    """Whole lines but for the last one; the same text gives the same piece."""
    digest = hashlib.sha256(f"{SEED}\n{text}".encode()).digest()
    place = random.Random(int.from_bytes(digest[:8], "big"))
    start = place.randint(0, max(0, len(text) - characters))
    start = text.rfind("\n", 0, start) + 1
    return text[start : start + characters]


def openings(text: str) -> Iterator[str]:
    """The beginnings of functions, up to the end of their docstrings; the longest first, because
    they determine most of what is to follow."""
    found = {function["header"] for function in requests_and_answers(text)}
    for opening in sorted(found, key=lambda o: (-len(o), o)):
        yield opening + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("corpus", type=Path, help="train.jsonl of recipes.mini.corpus")
    parser.add_argument("out", type=Path)
    parser.add_argument("--characters", type=int, default=1000, help="of each document")
    parser.add_argument("--functions", type=int, default=2, help="of each document")
    options = parser.parse_args()
    with options.corpus.open(encoding="utf-8") as lines:
        documents = [json.loads(line)["text"] for line in lines]
    with options.out.open("w", encoding="utf-8") as out:
        for prompt in prompts_of(documents, options.characters, options.functions):
            out.write(json.dumps(prompt) + "\n")


if __name__ == "__main__":
    main()
