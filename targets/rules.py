"""The requests' sampling parameters, a row per sequence: what every backend's sampler is told.

A table is filled in place, in numpy or in whatever else takes `table[row] = value`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from specdec.core.types import Array, Sampling


class Rules(NamedTuple):
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


def blank_rules(rows: int) -> Rules:
    """Greedy everywhere, in numpy: float32, int32, and uint32 for the seed."""
    zero, one = np.zeros(rows, np.float32), np.ones(rows, np.float32)
    whole = np.zeros(rows, np.int32)
    return Rules(
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


def set_rules(rules: Any, row: int, given: Sampling, prompt_len: int) -> None:
    """Write a request's parameters into its row, in place: a captured graph may read these very
    arrays."""
    rules.temperature[row] = given.temperature
    rules.top_k[row] = given.top_k
    rules.top_p[row] = given.top_p
    rules.min_p[row] = given.min_p
    rules.repetition[row] = given.repetition_penalty
    rules.presence[row] = given.presence_penalty
    rules.frequency[row] = given.frequency_penalty
    rules.seed[row, 0], rules.seed[row, 1] = split_seed(given.seed)
    rules.prompt_len[row] = prompt_len


def split_seed(seed: int) -> tuple[int, int]:
    """A request's 64-bit seed as the noise key's two words, low first."""
    return seed & 0xFFFFFFFF, seed >> 32
