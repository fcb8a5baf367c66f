"""What an event tells of a token is each number of the step's own row and position, as Python's."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.core.logprobs import StepLogprobs
from specdec.core.types import LogprobRows, Sampling, Sequence

ROWS = 3
WIDTH = 5
"""Positions of a row."""
BEST = 20
"""Alternatives at each."""
WORDS = 11
"""Of `LogprobRows.sampling`."""


def drawn(kind: type = np.uint32) -> LogprobRows:
    draw, size = np.random.default_rng(5), (ROWS, WIDTH)
    return LogprobRows(
        -draw.random(size, np.float32),
        draw.integers(0, 2**18, (*size, BEST), np.int32),
        -draw.random((*size, BEST), np.float32),
        draw.integers(0, 2**32, (*size, 2), np.uint32).astype(kind),
        draw.integers(0, 2**32, (ROWS, WORDS), np.uint32).astype(kind),
    )


@pytest.mark.parametrize("kind", [np.uint32, np.int64])
@pytest.mark.parametrize("best", [0, 1, 20])
def test_each_token_has_its_own_numbers(kind, best):
    """uint32 as JAX has them, int64 as torch."""
    rows, seq = drawn(kind), Sequence([1], Sampling(logprobs=best))
    told = StepLogprobs(rows)
    for b in range(ROWS):
        for count in range(WIDTH + 1):
            found = told.of(seq, b, count)
            assert found is not None and len(found) == count
            for j, one in enumerate(found):
                low, high = map(int, rows.checksums[b, j])
                assert one.logprob == rows.chosen[b, j] and type(one.logprob) is float
                assert one.checksum == low + 2**32 * high and type(one.checksum) is int
                assert one.sampling == b"".join(
                    int(word).to_bytes(4, "little") for word in rows.sampling[b]
                )
                assert [i for i, _ in one.top] == rows.top_ids[b, j, :best].tolist()
                assert [p for _, p in one.top] == rows.top_logprobs[b, j, :best].tolist()
                assert {type(i) for i, _ in one.top} <= {int}


def test_a_sequence_that_asks_for_none_is_told_none():
    assert StepLogprobs(drawn()).of(Sequence([1]), 0, 4) is None
