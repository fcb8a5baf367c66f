"""Contexts of more than 8,192 tokens, the ring of every sliding layer wrapped dozens of times."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from drafters.lookup.jax import TracedLookup
from drafters.ngram.host import NgramDrafter
from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.types import Sequence
from targets.jax.cache import entries
from targets.jax.device_drafter import TextDrafter
from targets.jax.device_loop import device_loop
from targets.jax.load import JaxOptions, load_target
from targets.jax.model import head, sequence_hidden
from targets.jax.programs import Feed
from targets.jax.target import JaxTarget
from tests.support.fakes import Noise
from tests.support.modes import MODES
from tests.support.tiny import VARIANTS, VOCAB, write_tiny

LENGTH = 8_300
NEW = 24
MAX_LEN = 8_448
SMALL = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2 * MAX_LEN,
}
"""Few heads: scoring a whole text compares all pairs of its tokens at once."""


def text_of(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, LENGTH).tolist()


@cache
def target_of(variant: str) -> JaxTarget:
    """Windows of 12, rings of 140 entries, two slots."""
    small = VARIANTS[variant] | SMALL
    small |= {"num_global_key_value_heads": 1} if small["attention_k_eq_v"] else {}
    small |= {"num_kv_shared_layers": 2} if "num_kv_shared_layers" in small else {}
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.setitem(VARIANTS, variant, small)
        write_tiny(Path(folder), variant)
        target = load_target(Path(folder), JaxOptions(slots=2, max_len=MAX_LEN, k=7))
    sliding = next(layer for layer in target.arch.layers if layer.window)
    assert LENGTH > 50 * entries(sliding, MAX_LEN, target.plan.slack)
    return target


@pytest.mark.parametrize("variant", ["31b", pytest.param("e4b", marks=pytest.mark.slow)])
def test_decoding_far_out_equals_scoring_the_whole_text(variant):
    target, text = target_of(variant), text_of(1)
    hidden = sequence_hidden(target.params, target.arch, np.array([text], np.int32)).last[0]
    seq, chunk, fed = Sequence(text, slot=1), target.prefill_chunk, 0
    for stop in (8_192, 8_192 + 77):  # at a chunk's cut and within a chunk
        while fed < stop:
            start, fed = fed, min(fed // chunk * chunk + chunk, stop)
            target.prefill(seq, start, fed)
        tokens = np.zeros((2, 8), np.int32)
        tokens[1] = text[fed : fed + 8]
        feed = Feed(tokens, np.array([0, fed], np.int32), np.array([0, 8], np.int32))
        far = target.logits(feed)[1]
        whole = np.asarray(head(target.params, target.arch, hidden[fed : fed + 8]))
        np.testing.assert_allclose(far, whole, rtol=2e-4, atol=2e-4)
        assert (far.argmax(-1) == whole.argmax(-1)).all()


@pytest.mark.slow  # shorter rows of blocks: test_long_cache.py
@pytest.mark.parametrize(
    ("variant", "mode"),
    [("31b", "everything"), ("e4b", "nucleus")],
)
def test_no_drafter_changes_a_token_far_out(variant, mode):
    target = target_of(variant)
    prompt = (text_of(2)[:40] * 300)[:LENGTH]  # something for prompt lookup to find

    def decode(drafter, cycle):
        seq = Sequence(list(prompt), MODES[mode](0), max_tokens=NEW, request_id="0")
        Engine(target, drafter, cycle).run_to_end([seq])
        return seq.tokens

    none, ngram = NoDrafter(), NgramDrafter(1, 3)
    plain = decode(none, host_cycle(target, none, 0))
    for drafter, k in ((ngram, 4), (Noise(VOCAB), 7)):
        assert decode(drafter, host_cycle(target, drafter, k)) == plain
    traced = TextDrafter(TracedLookup(1, 3))
    assert decode(none, device_loop(target, traced, 4)) == plain
