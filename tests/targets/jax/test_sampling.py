"""Each sampling parameter changes the distribution as it should, with and without speculation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from drafters.ngram.host import NgramDrafter
from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.types import MAX_LOGPROBS, Sampling, Sequence
from targets.jax import noise, sampling
from targets.jax.load import JaxOptions, load_target
from targets.sampling_params import blank_table, set_row, split_seed

pytestmark = pytest.mark.usefixtures("cheap_programs")

VOCAB = 12
LOGITS = np.linspace(2.0, -2.0, VOCAB).astype(np.float32) + np.float32([0.3, 0] * 6)


def philox_by_hand(counter, key):
    """Random123's Philox-4x32-10 in Python integers."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        high0, low0 = divmod(c[0] * 0xD2511F53, 2**32)
        high1, low1 = divmod(c[2] * 0xCD9E8D57, 2**32)
        c = [high1 ^ c[1] ^ k0, low1, high0 ^ c[3] ^ k1, low0]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=6))
def test_philox_equals_integers_by_hand(words):
    arrays = [jnp.asarray([w], jnp.uint32) for w in words]
    ours = noise.philox(tuple(arrays[:4]), tuple(arrays[4:]))
    assert [int(w[0]) for w in ours] == philox_by_hand(words[:4], words[4:])


def test_philox_known_answers():
    """The known-answer vectors that ship with Random123 (kat_vectors, philox4x32-10)."""
    ones = 0xFFFFFFFF
    assert philox_by_hand([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox_by_hand([ones] * 4, [ones] * 2) == [
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    ]


def test_noise_depends_on_seed_position_and_token_only():
    seeds = jnp.asarray([split_seed(5), split_seed(2**40 + 5)], jnp.uint32)
    u = np.asarray(noise.uniform(seeds, jnp.asarray([3, 3]), 10))
    assert 0 < u.min() and u.max() < 1 and (u[0] != u[1]).all()
    again = np.asarray(noise.uniform(seeds[:1], jnp.asarray([3]), 7))
    assert (again[0] == u[0, :7]).all()


def draws(given: Sampling, count=20_000, history=(), logits=LOGITS, position=50):
    """Relative frequencies over `count` seeds, the text so far being `history` after a prompt."""
    sampling_params = blank_table(count)
    prompt = 2
    for slot in range(count):
        set_row(sampling_params, slot, given, prompt)
    sampling_params.seed[:, 0] = np.arange(count)
    text = np.full((count, position + 4), -1, np.int32)
    text[:, : len(history)] = history
    start = np.full(count, max(len(history) - 1, 0), np.int32)
    bias = np.zeros((count, VOCAB), np.float32)
    for token, value in given.logit_bias:
        bias[:, token] += value
    rows = np.tile(logits, (count, 1, 1))
    chosen = jax.jit(sampling.choose)(rows, bias, sampling_params, text, start)
    return np.bincount(np.asarray(chosen)[:, 0], minlength=VOCAB) / count


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def nucleus(p, share):
    order = np.argsort(-p)
    kept = order[: int((np.cumsum(p[order]) < share).sum()) + 1]
    cut = np.zeros_like(p)
    cut[kept] = p[kept]
    return cut / cut.sum()


def penalised(x, repeated=(), output=(), repetition=1.0, presence=0.0, frequency=0.0):
    x = x.copy()
    for token in set(repeated) | set(output):
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token in output:
        x[token] -= frequency
    for token in set(output):
        x[token] -= presence
    return x


P = softmax(LOGITS)
CASES = {
    "plain": (Sampling(temperature=1.0), P),
    "hot": (Sampling(temperature=2.0), softmax(LOGITS / 2)),
    "cold": (Sampling(temperature=0.5), softmax(LOGITS * 2)),
    "top_k": (Sampling(temperature=1.0, top_k=3), nucleus(P, 1e-9 + np.sort(P)[::-1][:3].sum())),
    "top_p": (Sampling(temperature=1.0, top_p=0.6), nucleus(P, 0.6)),
    "min_p": (
        Sampling(temperature=1.0, min_p=0.2),
        np.where(P >= 0.2 * P.max(), P, 0) / P[P >= 0.2 * P.max()].sum(),
    ),
    "bias": (
        Sampling(temperature=1.0, logit_bias=((5, 3.0), (0, -100.0))),
        softmax(LOGITS + np.eye(VOCAB)[5] * 3 - np.eye(VOCAB)[0] * 100),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_distribution(case):
    given, expected = CASES[case]
    expected = np.asarray(expected, np.float64)
    frequencies = draws(given)
    assert (frequencies[expected == 0] == 0).all()
    assert 0.5 * np.abs(frequencies - expected).sum() < 0.015


def test_penalties():
    history = [3, 3, 0, 1, 1]  # prompt 3 3, output 0 1 1
    for request, expected in [
        (
            Sampling(temperature=1.0, repetition_penalty=1.5),
            penalised(LOGITS, [3], [0, 1, 1], repetition=1.5),
        ),
        (
            Sampling(temperature=1.0, presence_penalty=1.0),
            penalised(LOGITS, [3], [0, 1, 1], presence=1.0),
        ),
        (
            Sampling(temperature=1.0, frequency_penalty=0.8),
            penalised(LOGITS, [3], [0, 1, 1], frequency=0.8),
        ),
    ]:
        frequencies = draws(request, history=history)
        assert 0.5 * np.abs(frequencies - softmax(expected)).sum() < 0.015


def test_greedy_takes_the_argmax_and_ties_go_to_the_lowest_id():
    tied = np.zeros(VOCAB, np.float32)
    tied[[4, 7]] = 1.0
    assert draws(Sampling(), 4, logits=tied).tolist() == np.eye(VOCAB)[4].tolist()


def test_penalties_count_the_draft_tokens_before_each_row():
    """Row t of one call equals the only row of a call that was fed the same text."""
    text = np.array([[3, 3, 0, 1, 1, 5, 0, -1, -1, -1, -1, -1]], np.int32)
    sampling_params = blank_table(1)
    request = Sampling(
        temperature=1.0,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        seed=11,
    )
    set_row(sampling_params, 0, request, 2)
    bias = np.zeros((1, VOCAB), np.float32)
    wide = sampling._penalise(
        jnp.asarray(np.tile(LOGITS, (1, 4, 1))), sampling_params, jnp.asarray(text), np.array([3])
    )
    for t in range(4):
        one = sampling._penalise(
            jnp.asarray(LOGITS[None, None]), sampling_params, jnp.asarray(text), np.array([3 + t])
        )
        assert (np.asarray(wide)[0, t] == np.asarray(one)[0, 0]).all()
    assert bias.sum() == 0


@pytest.fixture(scope="module")
def target(tiny):
    return load_target(tiny["31b"], JaxOptions(slots=8, max_len=64, k=4, chunk=8))


@pytest.mark.parametrize("k", [0, 4])
def test_through_the_engine_with_and_without_speculation(target, k):
    """First two sampled tokens over many seeds, against the model's own probabilities: the
    frequencies match with and without a drafter, and the ids are the same ones."""
    drafter = NgramDrafter(1, 2) if k else NoDrafter()
    engine = Engine(target, drafter, host_cycle(target, drafter, k), max_waiting=10_000)
    seqs = [
        Sequence([9, 9, 9, 9], Sampling(temperature=1.0, top_k=4, seed=s), max_tokens=3)
        for s in range(600)
    ]
    for _ in engine.run(seqs):
        pass
    second = [s.tokens[5] for s in seqs]
    first = np.bincount([s.tokens[4] for s in seqs], minlength=target.vocab) / 600
    assert (first > 0).sum() == 4
    probe = Sequence([9, 9, 9, 9], Sampling(temperature=1.0, logprobs=4), max_tokens=1)
    (event,) = list(engine.run([probe]))
    top = dict(event.logprobs[0].top)
    expected = np.exp([top[i] for i in top])
    expected /= expected.sum()
    found = np.array([first[i] for i in top])
    chi_square = (600 * (found - expected) ** 2 / expected).sum()
    assert chi_square < 16.3  # 3 degrees of freedom, p = 0.001
    assert len(set(second)) > 4


def test_logprobs_are_of_the_unshaped_distribution(tiny):
    target = load_target(tiny["31b"], JaxOptions(slots=1, max_len=64, k=4, chunk=8))
    plain = Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 0))
    prompt = [5, 6, 7]
    hot = Sequence(list(prompt), Sampling(temperature=2.0, seed=1, logprobs=5), max_tokens=6)
    events = list(plain.run([hot]))
    details = [d for e in events for d in e.logprobs]
    assert len(details) == 6 and all(len(d.top) == 5 for d in details)
    for detail in details:
        values = [v for _, v in detail.top]
        assert values == sorted(values, reverse=True) and np.exp(values).sum() <= 1 + 1e-5
        assert detail.logprob <= values[0]


def test_the_likeliest_come_in_order_and_ties_by_id():
    """Of a vocabulary that is cut into parts (see PARTS), and of one that isn't."""
    random = np.random.default_rng(0)
    for vocab in (4096, 321):
        logits = np.round(random.standard_normal((2, 3, vocab)) * 2).astype(np.float32)
        rules = np.zeros((2, vocab), np.float32), blank_table(2)
        best = sampling.logprobs(jnp.asarray(logits), jnp.zeros((2, 3), jnp.int32), *rules)
        assert (best.top_ids == np.argsort(-logits, -1, stable=True)[..., :MAX_LOGPROBS]).all()
