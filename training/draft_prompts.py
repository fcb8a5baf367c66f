"""Prompts for mini to answer when its EAGLE-3 head's data is distilled: source, and requests.

`python -m training.draft_prompts corpus/train.jsonl prompts.jsonl` writes one document in so many
whole (`specdec distil --cut` makes prompts of it), followed by requests for functions of the next.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from training.chats import chats_of

SEED = 0


def prompts_of(documents: list[str], every: int, chats: int) -> Iterator[dict[str, object]]:
    """One document in `every`, and after each up to `chats` requests made from those between."""
    for start in range(0, len(documents), every):
        yield {"text": documents[start], "category": "source"}
        between = documents[start + 1 : start + every]
        requests = (chat[0] for text in between for chat in chats_of(text, SEED))
        for request in islice(requests, chats):
            yield {"messages": [request], "category": "chat"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("corpus", type=Path, help="train.jsonl of training.corpus")
    parser.add_argument("out", type=Path)
    parser.add_argument("--every", type=int, default=14, help="one document in so many")
    parser.add_argument("--chats", type=int, default=8, help="requests after each document")
    options = parser.parse_args()
    with options.corpus.open(encoding="utf-8") as lines:
        documents = [json.loads(line)["text"] for line in lines]
    with options.out.open("w", encoding="utf-8") as out:
        for prompt in prompts_of(documents, options.every, options.chats):
            out.write(json.dumps(prompt) + "\n")


if __name__ == "__main__":
    main()
