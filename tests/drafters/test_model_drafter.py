"""A model as drafter: its cache always holds the committed text, with any arrivals and
cancellations."""

from __future__ import annotations

import itertools
from functools import cache

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from drafters.model.host import ModelDrafter
from drafters.model.jax import DeviceModel
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.types import NO_GUESS, Sampling, Sequence
from targets import mini
from targets.jax.device_loop import device_loop
from targets.jax.load import JaxOptions, load_target
from targets.tokenizer import load_tokenizer
from tests.support.fakes import FakeTarget

pytestmark = pytest.mark.usefixtures("cheap_programs")

PROMPTS = [[3, 1, 4], [1] * 9, [2, 7, 1, 8, 2, 8], [5], [9, 9, 8, 9, 9]]


class Fickle(FakeTarget):
    """Agrees with FakeTarget but at every third length."""

    def _choose(self, seq: Sequence, length: int) -> int:
        return (super()._choose(seq, length) + (length % 3 == 0)) % self.vocab


def run_checked(target, model, k, prompts, cancel=()):
    """Decode; after each turn the draft model must hold the text of every row, and nothing else.

    cancel: (turn, prompt) pairs.
    """
    drafter = ModelDrafter(model)
    engine = Engine(target, drafter, host_cycle(target, drafter, k))
    seqs = [Sequence(list(p), Sampling(seed=i), 30) for i, p in enumerate(prompts)]
    for seq in seqs:
        engine.submit(seq)
    turn = 0
    while not engine.idle:
        for when, who in cancel:
            seqs[who].cancelled |= when == turn
        engine.step()
        turn += 1
        for seq in engine.scheduler.running:
            settled = len(seq.tokens) - 2
            if settled + 2 >= model.max_len:
                continue  # too long for the draft model, which no longer runs
            assert model.fed[seq.slot, :settled].tolist() == seq.tokens[:settled]
    return [s.tokens for s in seqs], engine.acceptance


@given(
    k=st.integers(1, 7),
    slots=st.integers(1, 3),
    chunk=st.integers(1, 9),
    max_len=st.sampled_from([11, 24, 512]),
    cancel=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4)), max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_the_draft_cache_holds_the_committed_text(k, slots, chunk, max_len, cancel):
    target = FakeTarget(slots=slots, max_len=max_len)
    plain = FakeTarget(slots=1, max_len=max_len)
    alone, _ = run_checked(plain, FakeTarget(1, max_len=max_len), 1, PROMPTS)
    for model in (
        FakeTarget(slots, max_len=max_len, chunk=chunk),
        Fickle(slots, max_len=max_len, chunk=chunk),
    ):
        texts, _ = run_checked(target, model, k, PROMPTS, cancel)
        gone = {who for _, who in cancel}
        for i, text in enumerate(texts):
            assert text == alone[i] if i not in gone else text == alone[i][: len(text)]


def test_a_draft_model_that_agrees_is_always_right():
    for k in (1, 2, 4, 7):
        _, acceptance = run_checked(FakeTarget(max_draft=7), FakeTarget(chunk=3), k, PROMPTS)
        # of 30 tokens the first comes with the prompt, the others k + 1 a cycle
        assert acceptance.cycles == len(PROMPTS) * -(-29 // (k + 1))


def test_a_shorter_context_ends_the_guessing_not_the_text():
    target, short = FakeTarget(max_len=40), FakeTarget(max_len=12)
    texts, acceptance = run_checked(target, short, 4, [*PROMPTS, [7] * 20])
    assert [len(t) for t in texts] == [33, 39, 36, 31, 35, 40]
    assert 0 < acceptance.accepted <= 12 * len(PROMPTS)
    drafter, long = ModelDrafter(short), Sequence([7] * 20, slot=0)
    drafter.reset(long)
    assert (drafter.propose([long], 4).tokens == NO_GUESS).all()
    edge = Sequence([7] * 10, slot=1)
    drafter.reset(edge)
    edge.tokens.append(3)
    assert (drafter.propose([edge], 4).tokens == NO_GUESS).tolist() == [[False, True, True, True]]


def test_no_room_for_a_prompt_in_the_draft_model_fails_that_request_alone():
    class Full(FakeTarget):
        def prefill(self, seq, start, stop):
            if 8 in seq.tokens[start:stop]:
                raise MemoryError("no room for a chunk")
            return super().prefill(seq, start, stop)

    target, drafter = FakeTarget(), ModelDrafter(Full())
    engine = Engine(target, drafter, host_cycle(target, drafter, 4))
    seqs = [Sequence(list(p), max_tokens=9) for p in PROMPTS]
    errors = [event.error for event in engine.run(seqs) if event.error]
    assert errors == ["prefill: no room for a chunk"] * 2
    assert [s.finish for s in seqs] == ["length", "length", "error", "length", "error"]


@cache
def jax_target(path, width=None, slots=2):
    options = JaxOptions(slots=slots, max_len=96, k=7, width=width, chunk=8)
    return load_target(path, options)


def held(target, slot: int, count: int) -> list[np.ndarray]:
    """K and V of positions below `count` that a next token could still see, layer by layer."""
    plan, found = target.plan, []
    for group in jax.tree.leaves(target.cache.layers):
        size = group.shape[2]
        first = 0 if size >= plan.max_len else max(0, count - (size - plan.slack))
        found.append(np.asarray(group)[:, slot, np.arange(first, count) % size])
    return found


def assert_holds(model, fresh, seq, count):
    text = Sequence(seq.tokens[:count], slot=0)
    for start in range(0, count, fresh.prefill_chunk):
        fresh.prefill(text, start, min(count, start + fresh.prefill_chunk))
    for ours, theirs in zip(held(model, seq.slot, count), held(fresh, 0, count), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "draft", "loop"),
    [
        ("e2b", "e2b", "device"),
        pytest.param("31b", "12b", "host", marks=pytest.mark.slow),
        pytest.param("e4b", "e4b", "host", marks=pytest.mark.slow),
    ],
)
def test_draft_kv_equals_a_fresh_prefill(tiny, name, draft, loop):
    """Rings of 12 wrap several times; a draft model that agrees, and one that never does."""
    target, model = jax_target(tiny[name]), jax_target(tiny[draft], width=2)
    fresh = jax_target(tiny[draft], width=8)
    drafter = ModelDrafter(model)
    drive = host_cycle(target, drafter, 4)
    if loop == "device":
        drive = device_loop(target, DeviceModel(drafter), 4, 2)
    engine = Engine(target, drafter, drive)
    prompts = np.random.default_rng(1).integers(3, 300, (3, 21)).tolist()
    for i, prompt in enumerate(prompts):
        engine.submit(Sequence(prompt[: 21 - 9 * i], Sampling(0.8, seed=i), max_tokens=20))
    turns = itertools.count()
    while not engine.idle:
        engine.step()
        if next(turns) % 3 == 0:
            for seq in engine.scheduler.running:
                assert_holds(model, fresh, seq, len(seq.tokens) - 2)
    assert (engine.acceptance.rate > 0.9) == (name == draft)


@pytest.mark.slow
def test_guesses_with_the_targets_noise_agree_more_often():
    """mini-e for mini at T = 1: the same noise against the draft model's argmax."""
    path = mini.path("mini")
    encode = load_tokenizer(path).encode
    prompts = [encode(f"def {name}(") for name in ("quicksort", "parse_line", "read_file", "main")]
    target = load_target(path, JaxOptions(slots=2, max_len=128))
    model = load_target(mini.path("mini-e"), JaxOptions(slots=2, max_len=128, width=2))
    rates, texts = [], []
    for greedy in (False, True):
        drafter = ModelDrafter(model, greedy)
        engine = Engine(target, drafter, host_cycle(target, drafter, 3))
        seqs = [Sequence(list(p), Sampling(1.0, seed=7), 64) for p in prompts]
        engine.run_to_end(seqs)
        rates.append(engine.acceptance.tau)
        texts.append([s.tokens for s in seqs])
    assert texts[0] == texts[1]
    assert rates[0] > rates[1] > 1
