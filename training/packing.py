"""Answers to rows of one length: several documents per row, and none sees another.

Which rows a step sees is a function of (seed, step) alone: resuming needs no reader state.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec.core.errors import UserError

PADDING = -1
"""The document number of positions that belong to none."""


class PackedRows(NamedTuple):
    """[R, L] each. tokens int32; documents int32, PADDING outside; generated bool: the target
    chose this token; ends bool: a stop id after which nothing follows. states: what the teacher's
    forward makes of them (`targets.jax.model.Hidden`), None where it is still to run."""

    tokens: Any
    documents: Any
    generated: Any
    ends: Any
    states: Any = None


def pack(answers: Iterable[Any], length: int) -> PackedRows:
    """Rows of `training.distil.features`, in their order, each cut at `length` tokens.

    Raises UserError where nothing could be learned: no answer, or no generated token.
    """
    rows: list[list[dict[str, Any]]] = []
    room = 0
    for answer in answers:
        size = min(len(answer["input_ids"]), length)
        if size > room:
            rows.append([])
            room = length
        rows[-1].append(answer)
        room -= size
    if not rows:
        raise UserError("there are no answers to train on: distil some first")
    packed = _stack([_fill(row, length) for row in rows])
    if not packed.generated.any():
        raise UserError(
            f"no generated token is within the first {length} of any answer: train with a larger "
            "length, or distil shorter prompts"
        )
    return packed


def _fill(answers: list[dict[str, Any]], length: int) -> PackedRows:
    row = PackedRows(
        np.zeros(length, np.int32),
        np.full(length, PADDING, np.int32),
        np.zeros(length, bool),
        np.zeros(length, bool),
    )
    start = 0
    for number, answer in enumerate(answers):
        ids = answer["input_ids"][:length]
        place = slice(start, start + len(ids))
        row.tokens[place], row.documents[place] = ids, number
        row.generated[place] = answer["gen_mask"][:length]
        whole = len(ids) == len(answer["input_ids"])
        row.ends[place.stop - 1] = whole and answer["finish"] == "stop"
        start = place.stop
    return row


def _stack(rows: list[PackedRows]) -> PackedRows:
    return jax.tree.map(lambda *parts: np.stack(parts), *rows)


@lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, rows: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(rows)


def rows_of_step(rows: PackedRows, seed: int, step: int, batch: int) -> PackedRows:
    """The `batch` rows of one step: each epoch in its own order, nothing left out between."""
    count = len(rows.tokens)
    numbers = range(step * batch, (step + 1) * batch)
    chosen = [int(_epoch(seed, n // count, count)[n % count]) for n in numbers]
    return jax.tree.map(lambda part: part[chosen], rows)
