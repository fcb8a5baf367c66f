"""Texts of 20,480 to 131,072 tokens: plain, drafted, cold and warm answers are one, to the bits of
their logits, where a ring turns and the next block of a global layer begins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from drafters.lookup.jax import TracedLookup
from drafters.ngram.host import NgramDrafter
from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.prefix_cache.cache import PrefixCache
from specdec.core.prefix_cache.pool import Budget, SnapshotPool
from specdec.core.types import Sequence
from targets.jax.cache import entries
from targets.jax.device_drafter import TextDrafter
from targets.jax.device_loop import device_loop
from targets.jax.kv_exchange import BLOCK
from targets.jax.load import JaxOptions, load_target
from targets.jax.snapshots import SlotSnapshots
from targets.jax.target import JaxTarget
from tests.support.modes import MODES
from tests.support.tiny import VARIANTS, VOCAB, write_tiny

K = 4
BEFORE = 24
"""Tokens between a prompt's end and the edge that its answer crosses."""
NEW = 48
CHUNK = 496
"""Tokens per prefill call, so that rings have 512 entries, of which every edge is a multiple."""
PATTERN = 40
"""Tokens that a prompt repeats, for prompt lookup to find."""
SMALL = {
    "layer_types": ["sliding_attention", "full_attention"],
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_global_key_value_heads": 1,
    "global_head_dim": 16,
    "max_position_embeddings": 262_144,
}
"""One head: a long prompt compares all pairs of its tokens."""
EDGES = [
    pytest.param(20_480, False, id="20480"),
    pytest.param(32_768, True, marks=pytest.mark.slow, id="32768"),
    pytest.param(131_072, True, marks=pytest.mark.slow, id="131072"),
]
"""Each with whether the device loop is compiled, too."""


def target_of(folder: Path, max_len: int, patch: pytest.MonkeyPatch) -> JaxTarget:
    patch.setitem(VARIANTS, "31b", VARIANTS["31b"] | SMALL)
    write_tiny(folder, "31b")
    return load_target(folder, JaxOptions(slots=1, max_len=max_len, k=7, chunk=CHUNK))


@pytest.mark.parametrize(("edge", "on_device"), EDGES)
def test_far_out_no_drafter_and_no_reuse_changes_a_token(edge, on_device, tmp_path, monkeypatch):
    target = target_of(tmp_path, edge + NEW, monkeypatch)
    ring = entries(target.arch.layers[0], target.max_len, target.plan.slack)
    assert edge % BLOCK == edge % ring == 0 and target.max_len >= edge + NEW
    pattern = np.random.default_rng(1).integers(3, VOCAB, PATTERN).tolist()
    prompt = (pattern * (edge // PATTERN))[: edge - BEFORE]
    none, ngram, kept = NoDrafter(), NgramDrafter(1, 3), cache_of(target)

    def decode(drafter, cycle, mode="greedy", text=prompt, reuse: PrefixCache | None = kept):
        """The sequence, and of each new token what `TokenLogprob` has of all its logits."""
        told = replace(MODES[mode](0), logprobs=0)
        seq = Sequence(list(text), told, max_tokens=NEW, request_id="0")
        events = Engine(target, drafter, cycle, prefix_cache=reuse).run([seq])
        return seq, [one for event in events for one in event.logprobs or ()]

    plain, drafted = host_cycle(target, none, 0), host_cycle(target, ngram, K)
    cold, details = decode(none, plain, reuse=None)
    assert len(cold.tokens) == len(prompt) + NEW and not cold.cached and len(details) == NEW
    parting = edge * 3 // 4 // kept.unit * kept.unit
    decode(none, plain, text=prompt[:parting])
    warm, same = decode(none, plain)
    assert warm.cached == parting and warm.tokens == cold.tokens and same == details
    ways = [(ngram, drafted)]
    if on_device:
        ways.append((none, device_loop(target, TextDrafter(TracedLookup(1, 3)), K)))
    for mode in ("greedy", "everything"):
        alone, details = decode(none, plain, mode)
        for drafter, cycle in ways:
            found, same = decode(drafter, cycle, mode)
            assert found.cached > parting and found.acceptance.accepted
            assert found.tokens == alone.tokens and same == details, mode


def cache_of(target: JaxTarget) -> PrefixCache:
    own = SlotSnapshots(target)
    return PrefixCache(own.unit, [own], SnapshotPool(Budget(device=0, host=1 << 30)))
