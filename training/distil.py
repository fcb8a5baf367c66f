"""Self-distillation: the target's own answers as training data, in Arrow shards.

Ids are stored, never text to be tokenised again. Row i is prompt i, sampled with seed + i, so what
it holds depends neither on the drafter nor on the batch (the engine is lossless), and a run that
was killed goes on after its last whole shard with nothing lost and nothing doubled.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence as Seqs
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specdec.core.engine import Engine
from specdec.core.errors import UserError
from specdec.core.types import Sampling, Sequence
from specdec.core.writing import beside, writing
from training.manifest import agree, recall

if TYPE_CHECKING:  # takes seconds, with pandas: imported only to read or write answers
    from datasets import Dataset, Features

MANIFEST = "distil.json"


def features() -> Features:
    """One answer: prompt and answer together, which of the ids the target chose, why it ended."""
    from datasets import Features, Sequence as ListOf, Value

    return Features(
        {
            "row": Value("int64"),
            "input_ids": ListOf(Value("int32")),
            "gen_mask": ListOf(Value("bool")),
            "finish": Value("string"),
            "seed": Value("uint64"),
        }
    )


@dataclass(frozen=True)
class Source:
    """What decides every row; a folder belongs to one of these. Hashes are sha256."""

    target: str
    tokenizer: str
    template: str
    prompts: str
    sampling: dict[str, Any]
    max_tokens: int
    max_len: int
    stop_ids: tuple[int, ...]
    shard_rows: int
    rows: int
    backend: str
    dtype: str
    kv_dtype: str
    int8: bool
    tp: int


ADDED = "backend", "dtype", "kv_dtype", "int8", "tp"
"""Fields of a source that folders of 0.1.0 lack."""


class Progress(NamedTuple):
    """rows: finished, of all; tokens: generated in this run, in `seconds`."""

    rows: int
    tokens: int
    seconds: float


def prompts_hash(prompts: Seqs[Seqs[int]]) -> str:
    return hashlib.sha256(json.dumps([list(p) for p in prompts]).encode()).hexdigest()


def target_hash(path: Path) -> str:
    """A hash of a checkpoint's config and weights, file by file in the order of their names."""
    total = hashlib.sha256()
    for file in (path / "config.json", *sorted(path.glob("*.safetensors"))):
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()


def cut_documents(documents: Seqs[Seqs[int]], tokens: int) -> list[list[int]]:
    """Each document (BOS first) as prompts of up to `tokens` ids, each with that BOS in front; a
    last piece of less than half the length is left out, unless it is all there is."""
    pieces = []
    for first, *rest in documents:
        for start in range(0, max(len(rest), 1), tokens - 1):
            piece = rest[start : start + tokens - 1]
            if start == 0 or len(piece) >= tokens // 2:
                pieces.append([first, *piece])
    return pieces


def claim(out: Path, source: Source) -> int:
    """Make `out` this source's folder and return how many rows it already holds.

    Raises UserError where it belongs to another source; the message names the differences.
    """
    out.mkdir(parents=True, exist_ok=True)
    agree(
        out / MANIFEST,
        asdict(source),
        lambda names: (
            f"{out} holds answers of another run (other {names}): repeat that run's "
            "options to continue it, or name another --out"
        ),
        # The prompts are hashed as ids: a template that renders them alike makes the same rows.
        noted=("template",),
        added=ADDED,
    )
    return min(len(shards(out)) * source.shard_rows, source.rows)


def distil(
    engine: Engine,
    prompts: Seqs[Seqs[int]],
    sampling: Sampling,
    source: Source,
    out: Path,
    tell: Callable[[Progress], None] = lambda _: None,
) -> int:
    """Answer the prompts that `out` lacks, shard by shard; returns how many tokens were made."""
    start = claim(out, source)
    began, tokens, done = time.monotonic(), 0, start
    finished: dict[int, Sequence] = {}
    next_row = start
    for seq in _answers(engine, prompts, sampling, source, start):
        finished[int(seq.request_id)] = seq
        tokens, done = tokens + seq.emitted, done + 1
        tell(Progress(done, tokens, time.monotonic() - began))
        stop = min(next_row + source.shard_rows, source.rows)
        while next_row < stop and all(row in finished for row in range(next_row, stop)):
            _write_shard(out, next_row // source.shard_rows, next_row, stop, finished)
            next_row, stop = stop, min(stop + source.shard_rows, source.rows)
    return tokens


def _answers(
    engine: Engine, prompts: Seqs[Seqs[int]], sampling: Sampling, source: Source, start: int
) -> Iterator[Sequence]:
    """Finished sequences in the order in which they end; slots stay full across shards."""
    waiting = iter(range(start, source.rows))
    alive = 0
    while True:
        while alive < 2 * engine.target.slots and (row := next(waiting, None)) is not None:
            engine.submit(_sequence(prompts[row], row, sampling, source))
            alive += 1
        if not alive:
            return
        for event in engine.step():
            if event.error is not None:
                raise UserError(f"prompt {event.sequence.request_id}: {event.error}")
            if event.finish is not None:
                alive -= 1
                yield event.sequence


def _sequence(prompt: Seqs[int], row: int, sampling: Sampling, source: Source) -> Sequence:
    own = replace(sampling, seed=(sampling.seed + row) % 2**64)
    stops = frozenset(source.stop_ids)
    return Sequence(list(prompt), own, source.max_tokens, stops, request_id=str(row))


def _write_shard(
    out: Path, number: int, start: int, stop: int, finished: dict[int, Sequence]
) -> None:
    """A shard exists whole or not at all. Raises UserError on a full disk."""
    from datasets.arrow_writer import ArrowWriter

    shard = out / f"shard-{number:05d}.arrow"
    with (
        writing(shard, "the shards before it stand"),
        beside(shard) as file,
        ArrowWriter(features=features(), path=str(file)) as writer,
    ):
        for row in range(start, stop):
            writer.write(_record(row, finished.pop(row)))
        writer.finalize()


def _record(row: int, seq: Sequence) -> dict[str, Any]:
    return {
        "row": row,
        "input_ids": seq.tokens,
        "gen_mask": [False] * seq.prompt_len + [True] * seq.emitted,
        "finish": seq.finish,
        "seed": seq.sampling.seed,
    }


def shards(out: Path) -> list[Path]:
    return sorted(out.glob("shard-*.arrow"))


def read_manifest(out: Path) -> dict[str, Any]:
    """What the rows of a folder are. Raises UserError where it is no distilled data."""
    return recall(
        out / MANIFEST,
        lambda problem: (
            f"{out} holds no distilled answers ({problem}): make some with `specdec distil`"
        ),
    )


def read_answers(out: Path) -> tuple[Dataset, dict[str, Any]]:
    """All rows of a folder, memory-mapped, and its manifest. Raises UserError where it is empty."""
    from datasets import Dataset, concatenate_datasets

    manifest, files = read_manifest(out), shards(out)
    if not files:
        raise UserError(f"{out} holds no whole shard yet: run `specdec distil` to its end")
    return concatenate_datasets([Dataset.from_file(str(file)) for file in files]), manifest


class Split(NamedTuple):
    """Answers to train on, answers to judge by, and where they come from."""

    trained: Dataset
    heldout: Dataset
    source: dict[str, Any]


def split_answers(
    read: Seqs[tuple[Path, Dataset, dict[str, Any]]], target: str, heldout_share: float
) -> Split:
    """The answers of all folders; the last share of each is held out.

    read: folder, answers and manifest (`read_answers`). target: hash of the model that is to have
    written them. Raises UserError where another did.
    """
    from datasets import concatenate_datasets

    trained, heldout, parts = [], [], []
    for folder, answers, manifest in read:
        if manifest["target"] != target:
            raise UserError(f"{folder} was written by another model than this one: distil anew")
        first = len(answers) - max(1, round(len(answers) * heldout_share))
        trained.append(answers.select(range(first)))
        heldout.append(answers.select(range(first, len(answers))))
        parts.append(manifest | {"answers": len(answers)})
    source = {"target": target, "folders": parts}
    return Split(concatenate_datasets(trained), concatenate_datasets(heldout), source)
