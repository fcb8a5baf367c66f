"""The loop against a target that can be calculated by hand: no drafter may change a token."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from drafters.ngram.host import NgramDrafter
from drafters.none.host import NoDrafter
from specdec.core.accept import accept
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.errors import UserError
from specdec.core.scheduler import Scheduler
from specdec.core.sharing import QueueFull
from specdec.core.types import NO_GUESS, SAT_OUT, Proposal, Round, Sampling, Sequence, Step
from tests.support.fakes import FakeTarget, Noise, Oracle


def decode(drafter, prompts, k=4, slots=2, **request) -> dict[str, list[int]]:
    target = FakeTarget(slots=slots)
    engine = Engine(target, drafter, host_cycle(target, drafter, k))
    seqs = [
        Sequence(list(p), max_tokens=30, request_id=str(i), sampling=Sampling(seed=i), **request)
        for i, p in enumerate(prompts)
    ]
    for _ in engine.run(seqs):
        engine.scheduler.check()
    assert all(s.finish for s in seqs) and engine.idle
    return {s.request_id: s.tokens for s in seqs}


PROMPTS = [[3, 1, 4], [1] * 9, [2, 7, 1, 8, 2, 8], [5], [9, 9, 8, 9, 9]]


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=8), min_size=1, max_size=4))
def test_accept_is_the_length_of_the_equal_prefix(rows):
    k = min(map(len, rows))
    draft = np.array([r[:k] for r in rows], np.int32)
    chosen = np.array([[*([1] * k), 0] for _ in rows], np.int32)
    expected = [next((i for i in range(k) if r[i] != 1), k) for r in draft.tolist()]
    assert accept(draft, chosen).tolist() == expected


@given(st.integers(0, 4))
def test_accept_never_takes_no_guess(k):
    draft = np.full((2, k), NO_GUESS, np.int32)
    assert accept(draft, np.zeros((2, k + 1), np.int32)).tolist() == [0, 0]


@pytest.mark.parametrize("k", [0, 1, 2, 4, 7])
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_no_drafter_changes_a_token(k, slots):
    plain = decode(NoDrafter(), PROMPTS, k=0, slots=1)
    drafters = [
        NoDrafter(),
        NgramDrafter(),
        NgramDrafter(1, 3),
        Oracle(plain),
        Oracle(plain, shift=1),
        Noise(50),
        Noise(50, wild=True),
    ]
    for drafter in drafters:
        assert decode(drafter, PROMPTS, k, slots) == plain


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 49), min_size=1, max_size=20), min_size=1, max_size=6),
    k=st.integers(0, 7),
    slots=st.integers(1, 4),
    stop=st.sets(st.integers(0, 49), max_size=6),
)
def test_output_is_a_function_of_the_request_alone(prompts, k, slots, stop):
    request = {"stop_ids": frozenset(stop)}
    alone = {}
    for i, prompt in enumerate(prompts):
        target = FakeTarget(slots=1)
        engine = Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 0))
        seq = Sequence(list(prompt), sampling=Sampling(seed=i), max_tokens=30, **request)
        list(engine.run([seq]))
        alone[str(i)] = seq.tokens
    assert decode(NgramDrafter(1, 3), prompts, k, slots, **request) == alone


def test_a_perfect_drafter_accepts_everything():
    plain = decode(NoDrafter(), PROMPTS)
    target = FakeTarget(slots=1)
    drafter = Oracle(plain)
    engine = Engine(target, drafter, host_cycle(target, drafter, 4))
    seq = Sequence(list(PROMPTS[0]), max_tokens=26, request_id="0", sampling=Sampling(seed=0))
    list(engine.run([seq]))
    assert seq.acceptance.tau == 5.0 and seq.acceptance.rate == 1.0
    assert seq.acceptance.per_position(4) == [1.0] * 4


def test_stop_inside_an_accepted_run_discards_the_rest():
    plain = decode(NoDrafter(), PROMPTS)
    stop = plain["0"][len(PROMPTS[0]) + 2]
    cut = decode(Oracle(plain), PROMPTS[:1], k=7, stop_ids=frozenset({stop}))
    assert cut["0"] == plain["0"][: plain["0"].index(stop, len(PROMPTS[0])) + 1]


def test_length_limits():
    target = FakeTarget(slots=1, max_len=20)
    engine = Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 7))
    seq = Sequence([1, 2, 3], max_tokens=100)
    list(engine.run([seq]))
    assert seq.finish == "length" and len(seq.tokens) == 20
    with pytest.raises(UserError, match="--max-len"):
        engine.submit(Sequence([1] * 20, max_tokens=1))


def test_cancel_frees_the_slot_wherever_the_sequence_is():
    target = FakeTarget(slots=1)
    engine = Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 2))
    first, second, third = (Sequence([1, 2, 3] * 3, max_tokens=50) for _ in range(3))
    for seq in (first, second, third):
        engine.submit(seq)
    for _ in range(4):
        engine.step()
    first.cancelled = second.cancelled = True
    events = engine.step()
    assert {e.sequence for e in events if e.finish == "cancelled"} == {first, second}
    assert third.slot == 0
    while not engine.idle:
        engine.step()
    assert third.finish == "length" and third.emitted == 50


def test_the_waiting_queue_is_bounded():
    scheduler = Scheduler(slots=1, max_waiting=2, chunk=8)
    for _ in range(3):
        scheduler.submit(Sequence([1]))
    with pytest.raises(QueueFull):
        scheduler.submit(Sequence([1]))


@given(st.lists(st.sampled_from(["submit", "admit", "chunk", "cancel"]), max_size=60))
def test_scheduler_never_loses_or_doubles_a_slot(actions):
    scheduler = Scheduler(slots=2, max_waiting=3, chunk=4)
    alive: list[Sequence] = []
    for n, action in enumerate(actions):
        if action == "submit" and len(scheduler.waiting) < 3:
            alive.append(Sequence([1] * (1 + n % 11)))
            scheduler.submit(alive[-1])
        elif action == "admit":
            scheduler.admit()
        elif action == "chunk" and (chunk := scheduler.next_chunk()):
            seq, start, stop = chunk
            assert start < stop and (stop % 4 == 0 or stop == seq.prompt_len)
            scheduler.chunk_done(seq, stop)
        elif action == "cancel" and alive:
            alive.pop(n % len(alive)).cancelled = True
            scheduler.drop_cancelled()
        scheduler.check()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", float("nan"), "finite"),
        ("temperature", -1.0, "greedy"),
        ("top_p", 0.0, "top_p"),
        ("min_p", 2.0, "min_p"),
        ("top_k", -1, "top_k"),
        ("repetition_penalty", 0.0, "repetition_penalty"),
        ("logprobs", 21, "logprobs"),
        ("seed", -1, "seed"),
    ],
)
def test_sampling_refuses_what_makes_no_sense(field, value, words):
    with pytest.raises(UserError, match=words):
        Sampling(**{field: value})


@pytest.mark.parametrize("refusal", [UserError, MemoryError])
def test_what_the_target_refuses_fails_alone(refusal):
    class Picky(FakeTarget):
        def prefill(self, seq, start, stop):
            if 13 in seq.tokens:
                raise refusal("no thirteen")
            return super().prefill(seq, start, stop)

    target = Picky(slots=1)
    engine = Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 2))
    bad, good = Sequence([13], max_tokens=3), Sequence([1, 2], max_tokens=3)
    events = list(engine.run([bad, good]))
    assert bad.finish == "error" and good.emitted == 3
    assert [e.error for e in events if e.error] == ["prefill: no thirteen"]


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_driver_may_run_late_and_rows_may_sit_out(slots):
    """A driver that is one cycle behind returns no round at first, then rounds in which rows that
    joined or ended meanwhile sit out."""
    target = FakeTarget(slots=slots)
    drafter = NgramDrafter(1, 3)
    inner, turns = host_cycle(target, drafter, 4), itertools.count()

    def late(seqs, single):
        turn = next(turns)
        if turn % 3 == 0:
            return []
        awake = [b for b in range(len(seqs)) if (b + turn) % 2]
        if not awake:
            return []
        (done,) = inner([seqs[b] for b in awake], single)
        return [_spread(done, awake, len(seqs))]

    engine = Engine(target, drafter, late)
    seqs = [
        Sequence(list(p), max_tokens=30, request_id=str(i), sampling=Sampling(seed=i))
        for i, p in enumerate(PROMPTS)
    ]
    events = list(engine.run(seqs))
    assert {s.request_id: s.tokens for s in seqs} == decode(NoDrafter(), PROMPTS)
    assert all(event.tokens for event in events)
    assert engine.acceptance.emitted == sum(s.emitted - 1 for s in seqs)


def _spread(done: Round, awake: list[int], rows: int) -> Round:
    """The round of the rows that were awake as one of all rows; what sits out is garbage."""
    draft, chosen = np.full((rows, 4), 49, np.int32), np.full((rows, 5), 49, np.int32)
    accepted = np.full(rows, SAT_OUT, np.int32)
    draft[awake], chosen[awake] = done.proposal.tokens, done.step.chosen
    accepted[awake] = done.accepted
    return Round(Proposal(draft), Step(chosen), accepted)
