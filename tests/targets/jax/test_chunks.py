"""Chunks of prompts as work on a device."""

from __future__ import annotations

import jax

from specdec.core.types import Sequence
from targets import mini
from targets.jax.load import CHUNK, MAPPED_CHUNK, JaxOptions, load_target, make_plan
from targets.model_folder import read_arch


def test_a_prompt_never_has_two_chunks_in_a_devices_queue():
    """A short prompt that comes while a long one is read would wait for all that are enqueued."""
    target = load_target(mini.path("mini"), JaxOptions(slots=1, max_len=1024, k=0))
    chunk = target.prefill_chunk
    seq = Sequence([2] + [7] * (3 * chunk), slot=0)
    for start in range(0, 3 * chunk, chunk):
        target.prefill(seq, start, start + chunk)
        assert all(array.is_ready() for array in jax.tree.leaves(target.cache))


def test_chunks_are_shorter_where_rows_run_one_by_one():
    arch = read_arch(mini.path("mini"))
    assert make_plan(arch, JaxOptions(mapped=True)).chunk == MAPPED_CHUNK < CHUNK
    assert make_plan(arch, JaxOptions(mapped=False)).chunk == CHUNK
    assert make_plan(arch, JaxOptions(mapped=True, chunk=48)).chunk == 48
