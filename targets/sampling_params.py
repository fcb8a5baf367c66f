"""The requests' sampling parameters, a row per sequence: the input of every backend's sampler.

A table is filled in place, in numpy or in whatever else takes `table[row] = value`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from specdec.core.types import Array, Sampling

SPREAD = 0x9E3779B1
"""Factor of words in the second of `LogprobRows.checksums`: 2^32 divided by the golden ratio."""
WORDS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition",
    "presence",
    "frequency",
    "top_k",
    "seed, low",
    "seed, high",
    "bias, first sum",
    "bias, second sum",
)
"""`LogprobRows.sampling`: the bits of each parameter, in force or not, and two sums over those of
the row's biases, as `LogprobRows.checksums` are made. They are read where the sampler reads them,
and only whole numbers are added: no order or fusion of operations changes a bit."""
FLOATS = WORDS[:6]
"""The first of them: leaves of `SamplingTable` in float32."""


class SamplingTable(NamedTuple):
    """What `Sampling` holds, as arrays [B]; seed [B, 2]: the words of `split_seed`."""

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    repetition: Array
    presence: Array
    frequency: Array
    seed: Array
    prompt_len: Array


class Rules(NamedTuple):
    """By what tokens are chosen besides their logits. bias [slots, V]; history [slots, S] int32:
    what was fed at each position."""

    bias: Array
    sampling_params: SamplingTable
    history: Array


def blank_table(rows: int) -> SamplingTable:
    """Greedy everywhere, in numpy: float32, int32, and uint32 for the seed."""
    zero, one = np.zeros(rows, np.float32), np.ones(rows, np.float32)
    whole = np.zeros(rows, np.int32)
    return SamplingTable(
        temperature=zero.copy(),
        top_k=whole.copy(),
        top_p=one.copy(),
        min_p=zero.copy(),
        repetition=one.copy(),
        presence=zero.copy(),
        frequency=zero.copy(),
        seed=np.zeros((rows, 2), np.uint32),
        prompt_len=whole.copy(),
    )


def set_row(sampling_params: Any, row: int, sampling: Sampling, prompt_len: int) -> None:
    """Write a request's parameters into its row, in place: a captured graph may read these very
    arrays."""
    sampling_params.temperature[row] = sampling.temperature
    sampling_params.top_k[row] = sampling.top_k
    sampling_params.top_p[row] = sampling.top_p
    sampling_params.min_p[row] = sampling.min_p
    sampling_params.repetition[row] = sampling.repetition_penalty
    sampling_params.presence[row] = sampling.presence_penalty
    sampling_params.frequency[row] = sampling.frequency_penalty
    sampling_params.seed[row, 0], sampling_params.seed[row, 1] = split_seed(sampling.seed)
    sampling_params.prompt_len[row] = prompt_len


def split_seed(seed: int) -> tuple[int, int]:
    """A request's 64-bit seed as the noise key's two words, low first."""
    return seed & 0xFFFFFFFF, seed >> 32
