"""Prompts for mini to answer when its EAGLE-3 head's data is distilled: source, and requests.

`python -m training.draft_prompts corpus/train.jsonl prompts.jsonl` writes one document in so many
whole (`specdec distil --cut` makes prompts of it), followed by requests for functions of the next.
With `--openings N` it writes instead how up to N functions of each document begin, up to the end of
their docstrings.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from training.chats import chats_of, requests_and_answers

SEED = 0


def prompts_of(documents: list[str], every: int, chats: int) -> Iterator[dict[str, object]]:
    """One document in `every`, and after each up to `chats` requests made from those between."""
    for start in range(0, len(documents), every):
        yield {"text": documents[start], "category": "source"}
        between = documents[start + 1 : start + every]
        requests = (chat[0] for text in between for chat in chats_of(text, SEED))
        for request in islice(requests, chats):
            yield {"messages": [request], "category": "chat"}


def openings_of(documents: list[str], most: int) -> Iterator[dict[str, object]]:
    """The longest openings first: they say most about what is to follow."""
    for text in documents:
        openings = {function["header"] for function in requests_and_answers(text)}
        for opening in sorted(openings, key=lambda o: (-len(o), o))[:most]:
            yield {"prompt": opening + "\n", "category": "opening"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("corpus", type=Path, help="train.jsonl of training.corpus")
    parser.add_argument("out", type=Path)
    parser.add_argument("--every", type=int, default=14, help="one document in so many")
    parser.add_argument("--chats", type=int, default=8, help="requests after each document")
    parser.add_argument("--openings", type=int, default=0, help="functions of each document")
    options = parser.parse_args()
    with options.corpus.open(encoding="utf-8") as lines:
        documents = [json.loads(line)["text"] for line in lines]
    if options.openings:
        prompts = openings_of(documents, options.openings)
    else:
        prompts = prompts_of(documents, options.every, options.chats)
    with options.out.open("w", encoding="utf-8") as out:
        for prompt in prompts:
            out.write(json.dumps(prompt) + "\n")


if __name__ == "__main__":
    main()
