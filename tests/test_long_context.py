"""Contexts of more than 8,192 tokens, the ring of every sliding layer wrapped dozens of times."""

from __future__ import annotations

from functools import cache

import jax
import numpy as np
import pytest

from drafters.ngram.host import NgramDrafter
from drafters.ngram.jax import TracedNgram
from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.types import Sequence
from targets.arch import parse_arch
from targets.jax.cache import entries
from targets.jax.device_drafter import TextDrafter
from targets.jax.device_loop import device_loop
from targets.jax.model import head, sequence_hidden
from targets.jax.params import init_params
from targets.jax.programs import Feed, Plan
from targets.jax.target import JaxTarget
from tests.fakes import Noise, Oracle
from tests.modes import MODES
from tests.tiny import VOCAB, config_of

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
    config = config_of(variant)
    text = config["text_config"]
    text |= SMALL | {"num_hidden_layers": 4}
    text |= {"num_global_key_value_heads": 1} if text["attention_k_eq_v"] else {}
    text |= {"num_kv_shared_layers": 2} if text["num_kv_shared_layers"] else {}
    arch = parse_arch(config)
    plan = Plan(arch, slots=2, max_len=MAX_LEN, width=8, chunk=128, features=(), mapped=True)
    params = init_params(arch, jax.random.key(5))
    ring = entries(next(layer for layer in arch.layers if layer.window), MAX_LEN, plan.slack)
    assert LENGTH > 50 * ring
    return JaxTarget(plan, params, np.float32)


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


@pytest.mark.parametrize(
    ("variant", "mode"),
    [pytest.param("31b", "everything", marks=pytest.mark.slow), ("e4b", "nucleus")],
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
    for drafter, k in ((ngram, 4), (Oracle({"0": plain}, 0, VOCAB), 7), (Noise(VOCAB), 7)):
        assert decode(drafter, host_cycle(target, drafter, k)) == plain
    traced = TextDrafter(TracedNgram(1, 3))
    assert decode(none, device_loop(target, traced, 4)) == plain
