"""A step's log-probabilities as Python's numbers, for the events of its rows."""

from __future__ import annotations

from itertools import repeat

import numpy as np

from specdec.core.types import LogprobRows, Sequence, TokenLogprob

HALF = np.uint64(32)
"""Bits of each of the two sums that are one checksum."""


class StepLogprobs:
    """The numbers of all rows are converted at once: numpy's scalars, one by one, cost the host
    more than what it does with them."""

    def __init__(self, rows: LogprobRows) -> None:
        low, high = np.moveaxis(np.asarray(rows.checksums).astype(np.uint64), -1, 0)
        self._chosen = np.asarray(rows.chosen).tolist()
        self._checksums = (low | high << HALF).tolist()
        self._sampling = np.asarray(rows.sampling).astype("<u4")
        self._top_ids, self._top_logprobs = rows.top_ids, rows.top_logprobs

    def of(self, seq: Sequence, row: int, count: int) -> tuple[TokenLogprob, ...] | None:
        """Of a row's first `count` tokens; None where its sequence has none."""
        best = seq.sampling.logprobs
        if best is None:
            return None
        sampling = repeat(self._sampling[row].tobytes(), count)
        chosen, checksums = self._chosen[row], self._checksums[row]
        return tuple(map(TokenLogprob, chosen, self._tops(row, count, best), checksums, sampling))

    def _tops(self, row: int, count: int, best: int) -> list[tuple[tuple[int, float], ...]]:
        if best == 0:
            return [()] * count
        ids = np.asarray(self._top_ids)[row, :count, :best].tolist()
        values = np.asarray(self._top_logprobs)[row, :count, :best].tolist()
        return [tuple(zip(*each, strict=True)) for each in zip(ids, values, strict=True)]
