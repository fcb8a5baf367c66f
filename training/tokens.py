"""Documents to token arrays, and token arrays to training rows.

`python -m training.tokens CORPUS CHECKPOINT` writes CORPUS/train.npy (uint16, one long stream).
Which rows a step sees is a function of (seed, phase, step) alone: resuming needs no reader state.
"""

import argparse
import json
import multiprocessing
import random
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import tokenizers

from targets.tokenizer import Tokenizer, load_tokenizer
from training.chats import chats_of

CHAT_SHARE = 0.08  # of the training characters
BATCH = 512  # documents encoded at a time
BOS = 2
EOS = 1


def documents(path: Path) -> Iterator[dict[str, str]]:
    """The rows {package, path, text, key} of a corpus file."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def _chat_rendering(tokenizer: Tokenizer, text: str, seed: int) -> list[str]:
    return [
        tokenizer.render(messages, add_generation_prompt=False) for messages in chats_of(text, seed)
    ]


_worker_tokenizer: list[Tokenizer] = []  # one per process: a template cannot be pickled


def _start_worker(checkpoint: Path) -> None:
    _worker_tokenizer[:] = [load_tokenizer(checkpoint)]


def _chats_in_worker(job: tuple[str, int]) -> list[str]:
    return _chat_rendering(_worker_tokenizer[0], *job)


def all_chats(texts: list[str], checkpoint: Path, seed: int, workers: int) -> list[str]:
    """Every chat that the documents yield, rendered, in document order."""
    jobs = [(text, seed) for text in texts]
    if workers <= 1:
        tokenizer = load_tokenizer(checkpoint)
        return [chat for job in jobs for chat in _chat_rendering(tokenizer, *job)]
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _start_worker, (checkpoint,)) as pool:
        return [chat for chats in pool.imap(_chats_in_worker, jobs, 64) for chat in chats]


def training_texts(texts: list[str], chats: list[str], seed: int) -> list[str]:
    """Documents (<bos>…<eos>) and enough chats for CHAT_SHARE, in one shuffled order."""
    chance = random.Random(seed)
    chats = sorted(chats)
    chance.shuffle(chats)
    room = sum(map(len, texts)) * CHAT_SHARE / (1 - CHAT_SHARE)
    chosen = [f"<bos>{text}<eos>" for text in texts]
    for chat in chats:
        room -= len(chat)
        if room < 0:
            break
        chosen.append(chat)
    chance.shuffle(chosen)
    return chosen


def encode_stream(backend: tokenizers.Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts after each other: uint16 [N]."""
    parts = []
    for start in range(0, len(texts), BATCH):
        batch = backend.encode_batch_fast(texts[start : start + BATCH], add_special_tokens=False)
        parts.extend(np.asarray(encoding.ids, np.uint16) for encoding in batch)
    return np.concatenate(parts)


@lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, chunks: int, length: int) -> tuple[np.ndarray, int]:
    """The epoch's order of chunks and its common offset, so that cuts fall elsewhere each time."""
    generator = np.random.default_rng((seed, epoch, length))
    return generator.permutation(chunks), int(generator.integers(length))


def row_starts(seed: int, step: int, batch: int, length: int, total: int) -> np.ndarray:
    """Where the rows of one step begin in a stream of `total` tokens: int32 [batch]."""
    chunks = total // length - 1
    assert chunks >= 1, f"{total} tokens are too few for rows of {length}"
    starts = []
    for number in range(step * batch, (step + 1) * batch):
        order, offset = _epoch(seed, number // chunks, chunks, length)
        starts.append(int(order[number % chunks]) * length + offset)
    return np.asarray(starts, np.int32)


def main() -> None:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("checkpoint", type=Path, help="folder with the tokenizer files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    arguments = parser.parse_args()
    texts = [row["text"] for row in documents(arguments.corpus / "train.jsonl")]
    chats = all_chats(texts[::2], arguments.checkpoint, arguments.seed, arguments.workers)
    chosen = training_texts(texts, chats, arguments.seed)
    backend = tokenizers.Tokenizer.from_file(str(arguments.checkpoint / "tokenizer.json"))
    stream = encode_stream(backend, chosen)
    np.save(arguments.corpus / "train.npy", stream)
    used = len(chosen) - len(texts)
    print(json.dumps({"tokens": len(stream), "chats": used, "chats_found": len(chats)}))


if __name__ == "__main__":
    main()
