"""The torch sampler draws what the JAX sampler draws: same noise, same rules, same choice."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from specdec.core.types import Sampling
from targets.cuda import noise, sampling
from targets.cuda.ops import Rows
from targets.jax import noise as jax_noise, sampling as jax_sampling
from targets.sampling_params import WORDS, Rules, blank_table, set_row, split_seed

VOCAB = 517
SLOTS = 3
TOKENS = 4
PAST = 30


@pytest.mark.parametrize("seed", [0, 5, 2**32 - 1, 2**63 + 12345])
@pytest.mark.parametrize("position", [0, 1, 131_071])
def test_uniforms_are_bitwise_those_of_jax(seed, position):
    words = jnp.asarray(split_seed(seed), jnp.uint32)
    theirs = np.asarray(jax_noise.uniform(words, jnp.asarray(position), VOCAB))
    ours = noise.uniform(torch.tensor(split_seed(seed)), torch.tensor(position), VOCAB)
    assert (ours.numpy() == theirs).all() and 0 < theirs.min() and theirs.max() < 1


def test_the_last_word_stays_below_one(monkeypatch):
    ones = torch.full((2,), noise.MASK)
    monkeypatch.setattr(noise, "philox", lambda counter, key: (ones,) * 4)
    assert noise.uniform(torch.zeros(2, dtype=torch.int64), torch.tensor(0), 8).max() < 1


REQUESTS = [
    Sampling(),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.7, top_k=5, seed=4),
    Sampling(temperature=1.3, top_p=0.7, seed=2**40),
    Sampling(temperature=1.0, min_p=0.1, seed=6),
    Sampling(temperature=0.9, top_k=1, seed=7),
    Sampling(temperature=1.0, top_p=1e-6, seed=8),
    Sampling(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25),
    Sampling(temperature=1.0, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.3, seed=9),
]


def both(requests, logits, bias, history, start):
    """JAX's and our choices [B, T] for these requests in slots 0, 1, ..."""
    theirs = blank_table(SLOTS)
    ours = sampling.blank_table(SLOTS, "cpu")
    for slot, request in enumerate(requests):
        set_row(theirs, slot, request, 9)
        set_row(ours, slot, request, 9)
    expected = jax.jit(jax_sampling.choose)(logits, bias, theirs, history, start)
    tensors = [torch.from_numpy(a) for a in (logits, bias, history, start)]
    slots = torch.arange(SLOTS, dtype=torch.int32)
    rows = Rows(torch.zeros(logits.shape[:2], dtype=torch.int32), tensors[3], slots)
    return np.asarray(expected), sampling.choose(*tensors[:2], ours, tensors[2], rows), rows, ours


@pytest.mark.parametrize("first", range(0, len(REQUESTS), SLOTS))
@pytest.mark.parametrize("seed", range(4))
def test_choices_equal_jax(first, seed):
    random = np.random.default_rng(seed)
    logits = (3 * random.standard_normal((SLOTS, TOKENS, VOCAB))).astype(np.float32)
    logits[0, 0, 7:9] = logits[0, 0].max() + 1  # a tie at the top
    bias = np.where(random.random((SLOTS, VOCAB)) < 0.01, 4, 0).astype(np.float32)
    bias[:, 11] = -np.inf
    history = random.integers(-3, VOCAB + 3, (SLOTS, PAST)).astype(np.int32)
    start = np.array([0, 12, 20], np.int32)
    requests = REQUESTS[first : first + SLOTS]
    expected, chosen, rows, sampling_params = both(requests, logits, bias, history, start)
    assert (chosen.numpy() == expected).all()
    # a row alone, out of a call of its own
    tensors = [torch.from_numpy(a) for a in (logits, bias, history)]
    for b in range(SLOTS):
        for t in range(TOKENS):
            one = Rows(
                rows.tokens[b : b + 1, t : t + 1], rows.start[b : b + 1] + t, rows.slot[b : b + 1]
            )
            lone = sampling.choose(
                tensors[0][b : b + 1, t : t + 1], tensors[1], sampling_params, tensors[2], one
            )
            assert lone[0, 0] == expected[b, t]


def test_greedy_and_logprobs_equal_jax():
    random = np.random.default_rng(0)
    logits = random.standard_normal((SLOTS, TOKENS, VOCAB)).astype(np.float32)
    bias = random.standard_normal((SLOTS, VOCAB)).astype(np.float32)
    slots = torch.arange(SLOTS, dtype=torch.int32).flip(0)
    rows = Rows(torch.zeros((SLOTS, TOKENS)).int(), torch.zeros(SLOTS).int(), slots)
    chosen = sampling.choose_greedy(torch.from_numpy(logits), torch.from_numpy(bias), rows)
    assert (chosen.numpy() == np.asarray(jax_sampling.choose_greedy(logits, bias[::-1]))).all()
    tables = sampling.blank_table(SLOTS, "cpu"), blank_table(SLOTS)
    ours = details(logits, chosen, bias, tables[0], slots)
    theirs = jax_sampling.logprobs(
        jnp.asarray(logits), jnp.asarray(chosen.numpy()), bias[::-1].copy(), tables[1]
    )
    assert (ours.top_ids == np.asarray(theirs.top_ids)).all()
    for name in ("chosen", "top_logprobs"):
        assert np.abs(getattr(ours, name) - np.asarray(getattr(theirs, name))).max() < 1e-5
    assert (ours.checksums == np.asarray(theirs.checksums)).all()
    assert (ours.sampling == np.asarray(theirs.sampling)).all()


def details(logits, chosen, bias, table, slots):
    rules = Rules(torch.from_numpy(bias), table, torch.zeros((SLOTS, PAST), dtype=torch.int32))
    return sampling.on_host(sampling.logprobs(torch.from_numpy(logits), chosen, rules, slots))


ODD = Sampling(0.7, 40, 0.9, 0.01, 1.3, 0.5, 0.25, seed=2**40 + 5)
OTHER_WORDS = [
    ("temperature", replace(ODD, temperature=0.7 + 1e-7)),
    ("top_p", replace(ODD, top_p=0.9 + 1e-7)),
    ("min_p", replace(ODD, min_p=0.01 + 1e-9)),
    ("repetition", replace(ODD, repetition_penalty=1.3 + 2e-7)),
    ("presence", replace(ODD, presence_penalty=0.5 + 1e-7)),
    ("frequency", replace(ODD, frequency_penalty=0.25 + 1e-7)),
    ("top_k", replace(ODD, top_k=41)),
    ("seed, low", replace(ODD, seed=2**40 + 4)),
    ("seed, high", replace(ODD, seed=2**41 + 5)),
]


def words_of(request, bias):
    """JAX's and our words of a request in slot 1, beside others."""
    logits = np.zeros((SLOTS, 1, VOCAB), np.float32)
    biases = np.stack([bias[::-1], bias, bias[::-1]])
    theirs, ours = blank_table(SLOTS), sampling.blank_table(SLOTS, "cpu")
    for table in (theirs, ours):
        set_row(table, 1, request, 9)
    chosen = np.zeros((SLOTS, 1), np.int32)
    row = jax.jit(jax_sampling.logprobs)(logits, chosen, biases, theirs).sampling[1]
    slot = torch.tensor([1, -1], dtype=torch.int32)
    own = details(logits[:2], torch.from_numpy(chosen[:2]), biases, ours, slot)
    return np.asarray(row), own.sampling[0]


@pytest.mark.parametrize(("name", "other"), OTHER_WORDS)
def test_a_changed_parameter_changes_its_word_alone(name, other):
    bias = np.random.default_rng(0).standard_normal(VOCAB).astype(np.float32)
    (theirs, ours), (theirs_too, ours_too) = (words_of(each, bias) for each in (ODD, other))
    assert (ours == theirs).all() and (ours_too == theirs_too).all()
    assert [WORDS[i] for i in np.flatnonzero(ours != ours_too)] == [name]


@pytest.mark.parametrize("word", [0, 11, VOCAB - 1])
def test_the_last_bit_of_any_bias_changes_both_sums(word):
    bias = np.zeros(VOCAB, np.float32)
    bias[11], bias[12] = -4.5, -np.inf
    theirs, ours = words_of(ODD, bias)
    bias.view(np.int32)[word] ^= 1
    theirs_too, ours_too = words_of(ODD, bias)
    assert (ours == theirs).all() and (ours_too == theirs_too).all()
    assert np.flatnonzero(ours != ours_too).tolist() == [len(WORDS) - 2, len(WORDS) - 1]


@pytest.mark.parametrize("word", [0, 1, VOCAB - 1])
def test_the_last_bit_of_any_logit_changes_both_checksums(word):
    logits = torch.randn((1, 1, VOCAB), generator=torch.Generator().manual_seed(word))
    chosen = torch.zeros((1, 1), dtype=torch.int32)
    rules = np.zeros((1, VOCAB), np.float32), sampling.blank_table(1, "cpu"), torch.tensor([0])
    before = details(logits.numpy(), chosen, *rules).checksums
    logits.view(torch.int32)[0, 0, word] ^= 1
    assert (details(logits.numpy(), chosen, *rules).checksums != before).all()
