"""The assistant as a drafter of the JAX target: lossless in both loops, its guesses those of
transformers' own class on the committed text, its wrong inputs one line."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from drafters.assistant.jax.drafter import AssistantDraftHead, PlacedAssistant
from specdec.core.types import NO_GUESS, Sampling, Sequence
from targets.jax.host_drafter import HostHead
from targets.jax.load import JaxOptions, load_target
from targets.jax.noise import gumbel
from targets.model_folder import read_arch
from targets.sampling_params import split_seed
from tests.support.assistants import assistant_for, chain
from tests.support.eagle3_oracle import Judging
from tests.support.lossless import check_both_loops, check_guesses_end, decode_three
from tests.support.tiny import VOCAB

pytestmark = pytest.mark.usefixtures("cheap_programs")

K = 4


@cache
def target_of(path, slots=2):
    last = len(read_arch(path).layers) - 1
    return load_target(path, JaxOptions(slots=slots, max_len=96, k=7, chunk=8, features=(last,)))


def placed_of(path, variant, ids=None, **change):
    assistant = assistant_for(path, variant)._replace(target_ids=ids)
    given = {"ahead": 1, "greedy": False, "int8": False} | change
    return PlacedAssistant(assistant, target_of(path), **given)


def with_noise(sampling, length):
    """Chooses guess j as the target would: temperature alone."""

    def choose(logits, j):
        seed = np.array([split_seed(sampling.seed)], np.uint32)
        noise = np.asarray(gumbel(seed, np.array([length + j]), VOCAB))[0]
        return int((logits / sampling.temperature + noise).argmax())

    return choose


class Judged(Judging, HostHead):
    variant = ""

    def by_the_formulas(self, seq, guesses):
        chosen = {}
        if seq.sampling.temperature:
            chosen = {"choose": with_noise(seq.sampling, len(seq.tokens))}
        return chain(self.variant, seq.tokens, len(guesses), **chosen).tokens


@pytest.mark.parametrize("variant", ["31b", pytest.param("e4b", marks=pytest.mark.slow)])
def test_guesses_are_transformers_on_the_text(tiny, variant):
    """So nothing of a rejected draft, of another row or of an earlier cycle is left in them."""
    drafter = Judged(AssistantDraftHead(placed_of(tiny[variant], variant)))
    drafter.variant = variant
    decode_three(drafter.target, drafter, K, 20)
    assert drafter.judged >= 8


@pytest.mark.parametrize("variant", [pytest.param("31b", marks=pytest.mark.slow), "e4b"])
def test_lossless_in_both_loops(tiny, variant):
    drafter = HostHead(AssistantDraftHead(placed_of(tiny[variant], variant)))
    check_both_loops(target_of(tiny[variant]), drafter, K)


def test_nothing_is_guessed_beyond_the_context(tiny):
    target = target_of(tiny["31b"])
    drafter = HostHead(AssistantDraftHead(placed_of(tiny["31b"], "31b")))
    check_guesses_end(target, drafter, K, 96, (90, 95), context=96)


def test_a_pruned_head_guesses_as_the_whole_one_that_may_say_no_other_word(tiny, monkeypatch):
    path, target = tiny["31b"], target_of(tiny["31b"])
    ids = np.arange(0, VOCAB, 3)
    whole, pruned = (HostHead(AssistantDraftHead(placed_of(path, "31b", i))) for i in (None, ids))
    said = []
    for sampling in (Sampling(), Sampling(0.8, top_p=0.9, seed=3)):
        seq = Sequence([5, 9, 3, 8], sampling, slot=0)
        step = target.prefill(seq, 0, 4)
        seq.tokens.append(int(step.chosen[0, 0]))
        for drafter in (whole, pruned):
            seq_len = len(seq.tokens) - 1
            drafter.prefill(Sequence(seq.tokens[:seq_len], slot=0), 0, seq_len, step)
        barred = np.where(np.isin(np.arange(VOCAB), ids), 0, -np.inf).astype(np.float32)
        with monkeypatch.context() as patch:
            patch.setattr(target, "bias", target.bias + barred)
            expected = whole.propose([seq], K).tokens.tolist()
        assert pruned.propose([seq], K).tokens.tolist() == expected
        said += expected[0]
    assert set(said) <= set(ids.tolist()) and len(set(said)) > 1


def test_says_nothing_where_nothing_that_it_knows_may_be_said(tiny, monkeypatch):
    target = target_of(tiny["e4b"])
    drafter = HostHead(AssistantDraftHead(placed_of(tiny["e4b"], "e4b")))
    monkeypatch.setattr(target, "bias", target.bias - np.inf)
    for sampling in (Sampling(), Sampling(1.0, seed=3)):
        seq = Sequence([5, 6], sampling, slot=0)
        drafter.prefill(seq, 0, 2, target.prefill(seq, 0, 2))
        seq.tokens.append(4)
        monkeypatch.setattr(target, "bias", target.bias - np.inf)
        assert (drafter.propose([seq], K).tokens == NO_GUESS).all()
