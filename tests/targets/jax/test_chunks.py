"""Chunks of prompts as work on a device."""

from __future__ import annotations

import jax

from specdec.core.types import Sequence
from targets import mini
from targets.jax.load import JaxOptions, load_target


def test_a_prompt_never_has_two_chunks_in_a_devices_queue():
    """A short prompt that comes while a long one is read would wait for all that are enqueued."""
    target = load_target(mini.path("mini"), JaxOptions(slots=1, max_len=1024, k=0))
    chunk = target.prefill_chunk
    seq = Sequence([2] + [7] * (3 * chunk), slot=0)
    for start in range(0, 3 * chunk, chunk):
        target.prefill(seq, start, start + chunk)
        assert all(array.is_ready() for array in jax.tree.leaves(target.cache))
