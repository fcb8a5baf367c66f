"""What a target is made for, and the sizes at which its arithmetic changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from specdec.core.pages import PagePlan
from targets.cuda.cache import slack_of
from targets.cuda.graphs import first_rows

KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}
ARITHMETIC = 2
"""Goes up where the same plan and weights give other bits than before, as receipts name them: 2 has
more lanes of keys in long texts' global layers with one or two K/V heads."""
CALLS = 3
"""Calls of decoding's kernels that are quicker than the library's matmuls, which read weights that
are put in order first, by more launches than the host has time for."""
FINE = 64
"""FP8 weights meet inputs of 16 bits in prefill chunks of up to so many tokens. More are bound by
arithmetic, and their inputs are rounded to 8 bits, as a long chunk's are."""


@dataclass(frozen=True)
class Plan:
    """What a target is made for. dtype is one of reader.DTYPES, kv_dtype of KV_DTYPES."""

    slots: int
    max_len: int
    chunk: int
    """Tokens per prefill call; chunks are cut at its absolute multiples."""
    short: int
    """Tokens that one call of decoding's kernels prefills behind others; chunks of up to CALLS
    times as many run so, longer ones on the library."""
    first: int
    """Tokens that one call of decoding's kernels prefills where nothing is before them."""
    dtype: str
    kv_dtype: str
    features: tuple[int, ...]
    device: str
    own: Mapping[str, str] = field(default_factory=dict)
    """dtypes of weights, by name, that a file of 4 bits keeps otherwise."""
    correlation: float = 0.0
    """For random weights: correlation of rows' router logits (`targets.routing`)."""
    pages: PagePlan | None = field(default=None, repr=False)
    """None: each slot has room for the longest text. It changes no bit, so `identity` leaves it
    out."""

    @property
    def slack(self) -> int:
        """Extra cache entries."""
        return slack_of(self.chunk, self.short)

    @property
    def first_rows(self) -> int:
        """Rows of the longest call at a text's beginning."""
        return first_rows(self.first, self.chunk, self.max_len)

    @property
    def positions(self) -> int:
        """Positions that a call may compute, past its sequence's end included."""
        return max(self.max_len + self.slack, self.first_rows)
