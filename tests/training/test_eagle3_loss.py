"""The teacher is the target, the loss is its formulas, what is measured is what decoding does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from drafters.eagle3.jax import head as eagle3
from targets.jax.model import head, sequence_hidden
from tests.support.eagle3_oracle import SPEC, Oracle, random_head
from tests.support.eagle3_worker import answers, target
from training.packing import PackedRows, pack
from training.teacher import TeacherOutput, teach
from training.unroll import (
    Judged,
    _compare,
    _coupled,
    continued,
    judge,
    loss_of,
    masks,
    measures,
    simulated,
    walked_tau,
)

pytestmark = pytest.mark.usefixtures("cheap_programs")

STEPS = 3
DECAY = 0.8
masks_of = jax.jit(masks, static_argnums=1)


def lesson_for(rows: PackedRows, ids: np.ndarray) -> TeacherOutput:
    """Made-up features and distributions; at some positions the favourite is no draft id."""
    random, shape = np.random.default_rng(0), rows.tokens.shape
    features = random.standard_normal((*shape, SPEC.features)).astype(np.float32)
    whole = random.standard_normal((*shape, SPEC.vocab)).astype(np.float32) * 3
    total = np.asarray(jax.nn.logsumexp(whole, -1))
    return TeacherOutput(features, whole[..., ids], total, whole.argmax(-1).astype(np.int32))


def judged(head, rows: PackedRows, lesson: TeacherOutput, table, weights=None):
    placed, ids = eagle3.place(head, jnp.float32)
    lesson = jax.tree.map(jnp.asarray, lesson)
    return judge(weights or placed, head.spec, jnp.asarray(table), ids, rows, lesson, STEPS)


def small_rows(count: int = 4, length: int = 20) -> PackedRows:
    made = [a | {"input_ids": [i % SPEC.vocab for i in a["input_ids"]]} for a in answers(count)]
    return pack(made, length)


def test_the_teacher_is_the_target_alone_with_each_document() -> None:
    params, arch = target()
    rows, ids = pack(answers(2), 64), np.arange(arch.vocab)
    lesson = jax.jit(lambda rows: teach(params, arch, (1, 3, 5), ids, (7,), rows))(rows)
    hear = jax.jit(lambda tokens: sequence_hidden(params, arch, tokens, (1, 3, 5)))
    for r in range(len(rows.tokens)):
        for document in range(rows.documents[r].max() + 1):
            at = rows.documents[r] == document
            alone, size = rows.tokens[r][at][None], at.sum()
            hidden = hear(np.pad(alone, ((0, 0), (0, 64 - size))))
            expected = np.array(head(params, arch, hidden.last)[0, :size])
            expected[:, 7] = -np.inf
            np.testing.assert_allclose(lesson.features[r][at], hidden.features[0, :size], atol=1e-4)
            np.testing.assert_allclose(lesson.logits[r][at], expected, atol=1e-4)
            assert np.array_equal(lesson.best[r][at], expected.argmax(-1))
            total = np.log(np.exp(expected.astype(np.float64)).sum(-1))
            np.testing.assert_allclose(lesson.total[r][at], total, atol=1e-4)


def oracle_loss(
    oracle: Oracle, rows: PackedRows, lesson: TeacherOutput, table, ids, kind
) -> torch.Tensor:
    """The loss, anchor by anchor, from the definition (arXiv 2602.23881 for "lk")."""
    terms: list[list[torch.Tensor]] = [[] for _ in range(STEPS)]
    wanted = [np.asarray(mask) for mask in masks_of(rows, STEPS)]
    embeddings = torch.tensor(table)
    for r, i in zip(*np.nonzero(wanted[0]), strict=True):
        begin = int(np.flatnonzero(rows.documents[r] == rows.documents[r, i])[0])
        tokens = np.append(rows.tokens[r], np.zeros(STEPS, np.int32))[begin + 1 :]
        features = torch.tensor(np.asarray(lesson.features[r])[begin:])
        guessed = oracle.chain(embeddings[tokens], features, int(i) - begin, STEPS)
        for n in range(STEPS):
            at = (r, i + 1 + n)
            if wanted[n][r, i] and int(lesson.best[at]) in ids:
                share = torch.tensor(np.asarray(lesson.logits[at])).log_softmax(-1)
                log_q = guessed[n].log_softmax(-1)
                divergence = (share.exp() * (share - log_q)).sum()
                p = torch.tensor(np.exp(np.asarray(lesson.logits[at] - lesson.total[at])))
                overlap = torch.minimum(p, log_q.exp()).sum()
                part = torch.exp(-3.0 * overlap.detach()) if kind == "lk" else 1.0
                terms[n].append(part * divergence + (1 - part) * (1 - overlap))
    assert all(terms)
    return sum(DECAY**n * torch.stack(t).mean() for n, t in enumerate(terms))  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["kl", "lk"])
def test_loss_and_gradients_equal_the_formulas(kind) -> None:
    head, rows = random_head(fc_norm=True, norm_output=True), small_rows()
    lesson = lesson_for(rows, head.target_ids)
    table = np.random.default_rng(5).standard_normal((SPEC.vocab, SPEC.hidden)).astype(np.float32)

    def loss(weights):
        return loss_of(judged(head, rows, lesson, table, weights), DECAY, kind)

    value, gradient = jax.jit(jax.value_and_grad(loss))(eagle3.place(head, jnp.float32)[0])
    oracle = Oracle(head, grad=True)
    expected = oracle_loss(oracle, rows, lesson, table, set(head.target_ids.tolist()), kind)
    expected.backward()
    assert abs(float(value) - expected.item()) < 1e-5
    for name, weight in oracle.w.items():
        assert weight.grad is not None
        np.testing.assert_allclose(gradient[name], weight.grad.numpy(), atol=1e-5, err_msg=name)


def test_packed_documents_are_judged_as_if_alone() -> None:
    head, made = random_head(), answers(6)
    made = [a | {"input_ids": [i % SPEC.vocab for i in a["input_ids"]]} for a in made]
    packed = pack(made, 64)
    table = np.random.default_rng(5).standard_normal((SPEC.vocab, SPEC.hidden)).astype(np.float32)
    lesson = lesson_for(packed, head.target_ids)
    count = len(packed.tokens)  # of rows each time, so that one program judges all
    judge_rows = jax.jit(lambda rows, lesson: judged(head, rows, lesson, table))
    together = jax.tree.map(np.asarray, judge_rows(packed, lesson))
    number = 0
    for r in range(len(packed.tokens)):
        for document in range(packed.documents[r].max() + 1):
            at = np.flatnonzero(packed.documents[r] == document)
            begun = jax.tree.map(lambda x, r=r, at=at: np.roll(x[r], -at[0], 0), lesson)
            own = jax.tree.map(lambda x: np.broadcast_to(x, (count, *x.shape)), begun)
            one = jax.tree.map(lambda x: x.repeat(count, 0), pack([made[number]], 64))
            alone, size = jax.tree.map(np.asarray, judge_rows(one, own)), len(at)
            assert np.array_equal(alone.mask[:, 0, :size], together.mask[:, r, at])
            for field in ("divergence", "hit", "overlap"):
                part = getattr(together, field)[:, r, at] * together.mask[:, r, at]
                theirs = (getattr(alone, field) * alone.mask)[:, 0, :size]
                np.testing.assert_allclose(part, theirs, atol=1e-5)
            number += 1


def test_measures_of_a_perfect_draft() -> None:
    """A draft that is the target has overlap 1 and is always accepted, whatever it chose."""
    head, rows = random_head(), small_rows()
    ids = jnp.asarray(head.target_ids)
    guessed = jax.random.normal(jax.random.key(2), (*rows.tokens.shape, len(ids))) * 3
    total = jax.nn.logsumexp(guessed, -1)
    taught = TeacherOutput(None, guessed, total, ids[guessed.argmax(-1)])
    chosen = jax.random.choice(jax.random.key(3), ids, rows.tokens.shape)
    compared = jax.jit(_compare)(guessed, taught, ids, chosen)
    fields = (np.stack([x] * STEPS) for x in compared)
    told = jax.jit(continued, static_argnums=1)
    counts = (np.stack(found(rows, STEPS)).astype(np.float32) for found in (masks_of, told))
    perfect = Judged(*counts, *fields)
    key = jax.random.key(0)
    found = jax.jit(lambda judged: measures(judged) | simulated(judged, key))(perfect)
    for name in ("accuracy", "overlap", "coupled", "known"):
        np.testing.assert_allclose(found[name], 1.0, atol=1e-5)
    for name in ("tau_t0", "tau_t1", "tau_t1_bound"):
        np.testing.assert_allclose(found[name], 1 + STEPS, atol=1e-4)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 999), st.integers(1, 4))
def test_simulated_tau_is_that_of_decoding_the_rows(seed, steps) -> None:
    rows = jax.tree.map(lambda part: part[:3], pack(answers(15, seed), 40))
    mask = np.stack(masks_of(rows, steps))
    hit = np.random.default_rng(seed).random(mask.shape) < 0.6
    cycles = emitted = 0
    for r in range(mask.shape[1]):
        i = 0
        while i < mask.shape[2]:
            if not mask[0, r, i]:
                i += 1
                continue
            count = 0
            while count < steps and mask[count, r, i] and hit[count, r, i]:
                count += 1
            if mask[-1, r, i]:
                cycles, emitted = cycles + 1, emitted + count + 1
            i += count + 1
    expected = emitted / cycles if cycles else 1.0
    assert np.isclose(jax.jit(walked_tau)(jnp.float32(hit), jnp.float32(mask)), expected)


def test_coupled_choices_agree_as_often_as_the_formulas_say() -> None:
    """Each choice of the target's for itself, over 200,000 draws; and all together between
    (1 - TV) / (1 + TV) and 1 - TV (arXiv 2408.07978)."""
    p, q = (jax.nn.log_softmax(jax.random.normal(jax.random.key(i), (9,)) * 1.5) for i in (0, 1))
    noise = jax.random.gumbel(jax.random.key(7), (200_000, 9))
    q = jax.nn.log_softmax(q[1:])  # token 0 is no draft id
    targets, drafts = np.argmax(p + noise, -1), 1 + np.argmax(q + noise[:, 1:], -1)
    chance = _coupled(p[1:], q, np.arange(1, 9) == np.arange(9)[:, None])
    assert chance[0] == 0
    for choice in range(1, 9):
        drawn = (drafts == choice)[targets == choice]
        assert abs(drawn.mean() - chance[choice]) < 4 * (0.25 / len(drawn)) ** 0.5
    together, overlap = (jnp.exp(p) * chance).sum(), jnp.exp(jnp.minimum(p[1:], q)).sum()
    assert abs((targets == drafts).mean() - together) < 0.005
    assert overlap / (2 - overlap) < together < overlap
