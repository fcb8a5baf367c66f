"""Slots and the waiting queue are shared: over callers, then over one caller's requests."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from hypothesis import given, strategies as st

from drafters.ngram.host import NgramDrafter
from serve.lockstep import _packed, _unpacked
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.scheduler import Scheduler
from specdec.core.sharing import QueueFull
from specdec.core.types import Owner, Sampling, Sequence
from tests.support.fakes import FakeTarget
from tests.support.serving import ServedTarget, Server, serving

KEYS = ["eins", "zwei", "drei"]


def sequences(caller: str, request: str = "", count: int = 1) -> list[Sequence]:
    owner = Owner(caller, request)
    return [Sequence([1], request_id=f"{caller}{request}", owner=owner) for _ in range(count)]


def scheduler_with(slots: int, *groups: list[Sequence]) -> Scheduler:
    scheduler = Scheduler(slots=slots, max_waiting=1000, chunk=8)
    for group in groups:
        for seq in group:
            scheduler.submit(seq)
    return scheduler


def order_of(scheduler: Scheduler) -> list[str]:
    """The request ids in the order of seating, if each sequence is released at once."""
    seated = []
    while scheduler.waiting:
        assert scheduler.free
        for seq in scheduler.admit():
            seated.append(seq.request_id)
            scheduler.release(seq)
    return seated


def test_a_lone_callers_requests_come_first_come_first_served():
    names = [str(number) for number in range(9)]
    scheduler = scheduler_with(2, *[sequences("", name) for name in names])
    assert order_of(scheduler) == names


def test_callers_take_turns():
    first = [sequences("a", str(number)) for number in range(4)]
    second = [sequences("b", str(number)) for number in range(2)]
    scheduler = scheduler_with(1, *first, *second)
    assert order_of(scheduler) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_a_requests_choices_take_turns_with_the_callers_other_requests():
    scheduler = scheduler_with(1, sequences("a", "0", 5), sequences("a", "1", 2), sequences("b"))
    assert order_of(scheduler) == ["a0", "b", "a1", "a0", "a1", "a0", "a0", "a0"]


def test_slots_that_are_held_count_before_turns():
    """A new request holds no slot, so it is seated before further choices of requests that already
    hold slots."""
    many = sequences("a", "0", 20)
    scheduler = scheduler_with(4, many)
    seated = scheduler.admit()
    for newcomer in (*sequences("a", "1"), *sequences("b", "2")):
        scheduler.submit(newcomer)
    for seq in seated[:3]:
        scheduler.release(seq)
    assert [seq.request_id for seq in scheduler.admit()] == ["b2", "a1", "a0"]


def test_no_stream_of_newcomers_starves_a_request():
    scheduler = scheduler_with(1, sequences("a", "old", 3))
    seated: Counter[str] = Counter()
    for number in range(20):
        scheduler.submit(sequences("a", f"new{number}")[0])
        for seq in scheduler.admit():
            seated[seq.request_id] += 1
            scheduler.release(seq)
    assert seated["aold"] == 3


def read_in_order(prompts: list[int], slots: int = 4, chunk: int = 8) -> list[str]:
    """Which prompts are read, chunk by chunk."""
    scheduler = Scheduler(slots=slots, max_waiting=1000, chunk=chunk)
    for number, length in enumerate(prompts):
        scheduler.submit(Sequence([1] * length, request_id=str(number)))
    scheduler.admit()
    read = []
    while (found := scheduler.next_chunk()) is not None:
        seq, _, stop = found
        read.append(seq.request_id)
        scheduler.chunk_done(seq, stop)
    return read


def test_a_short_prompt_waits_for_one_chunk_of_a_long_one():
    assert read_in_order([80, 8, 16]).index("1") <= 1
    assert "".join(read_in_order([80, 8, 16])) == "0102020000000"


def test_prompts_of_one_length_are_read_one_after_another():
    assert "".join(read_in_order([24, 24, 24])) == "000111222"


def test_short_prompts_leave_every_other_chunk_to_those_who_came_first():
    read = read_in_order([160, *[8] * 9], slots=10)
    assert "".join(read[:18]) == "010203040506070809"


def prompts(*lengths: int) -> list[Sequence]:
    """Those of each length are a request of their own."""
    return [Sequence([1] * n, request_id=str(n), owner=Owner("", str(n))) for n in lengths]


def seated_by(scheduler: Scheduler, seqs: list[Sequence]) -> list[str]:
    for seq in seqs:
        scheduler.submit(seq)
    return [seq.request_id for seq in scheduler.admit()]


def test_long_prompts_that_wait_for_their_turn_leave_the_last_slot_to_a_short_one():
    scheduler = Scheduler(slots=4, max_waiting=1000, chunk=8)
    assert seated_by(scheduler, prompts(80, 81, 82, 83)) == ["80", "81", "82"]
    assert seated_by(scheduler, prompts(8)) == ["8"]


def test_a_prompt_of_half_their_length_takes_the_last_slot():
    scheduler = Scheduler(slots=4, max_waiting=1000, chunk=8)
    assert seated_by(scheduler, prompts(80, 81, 82, 41, 40)) == ["80", "81", "82", "40"]


@pytest.mark.parametrize("slots", [1, 2])
def test_long_prompts_take_all_slots_where_each_has_its_turn(slots):
    scheduler = Scheduler(slots=slots, max_waiting=1000, chunk=8)
    assert len(seated_by(scheduler, prompts(*[80] * slots))) == slots


def test_no_stream_of_short_prompts_keeps_a_long_one_from_a_slot():
    scheduler = Scheduler(slots=4, max_waiting=1000, chunk=8)
    seated = seated_by(scheduler, prompts(80, 81, 82, 83))
    for _ in range(60):
        found = scheduler.next_chunk()
        assert found is not None
        seq, _, stop = found
        if scheduler.chunk_done(seq, stop) and seq.prompt_len == 8:
            scheduler.release(seq)  # its answer is one token
        seated += seated_by(scheduler, prompts(8))
    assert "83" in seated


def test_a_full_queue_has_room_for_a_caller_that_holds_less_than_its_part():
    scheduler = Scheduler(slots=1, max_waiting=4, chunk=8)
    for seq in sequences("a", "0", 5):
        scheduler.submit(seq)
    with pytest.raises(QueueFull):
        scheduler.submit(sequences("a", "1")[0])
    for seq in sequences("b", "0", 2):
        scheduler.submit(seq)
    for caller in "ab":
        with pytest.raises(QueueFull):
            scheduler.submit(sequences(caller, "2")[0])
    scheduler.submit(sequences("c")[0])


def test_no_queue_means_none_for_all():
    scheduler = Scheduler(slots=1, max_waiting=0, chunk=8)
    scheduler.submit(sequences("a")[0])
    with pytest.raises(QueueFull):
        scheduler.submit(sequences("b")[0])


@given(
    st.lists(
        st.tuples(st.sampled_from(["submit", "admit", "cancel"]), st.integers(0, 99)), max_size=80
    )
)
def test_equal_orders_seat_equal_sequences(actions):
    """What processes in lockstep rely on; no slot is lost meanwhile, nothing waits for ever."""
    twins = Scheduler(slots=2, max_waiting=6, chunk=4), Scheduler(slots=2, max_waiting=6, chunk=4)
    made: tuple[list[Sequence], list[Sequence]] = ([], [])
    for action, number in actions:
        told = []
        for scheduler, alive in zip(twins, made, strict=True):
            told.append(act(scheduler, alive, action, number))
            scheduler.check()
        assert told[0] == told[1]
    for scheduler in twins:
        for seq in list(scheduler.prefilling):
            scheduler.release(seq)
        order_of(scheduler)
        assert not scheduler.waiting


def act(scheduler: Scheduler, alive: list[Sequence], action: str, number: int) -> object:
    if action == "submit":
        seq = sequences("abc"[number % 3], str(number % 5))[0]
        try:
            scheduler.submit(seq)
        except QueueFull as full:
            return str(full)
        alive.append(seq)
    elif action == "admit":
        return [(seq.request_id, seq.slot) for seq in scheduler.admit()]
    elif alive:
        alive.pop(number % len(alive)).cancelled = True
        scheduler.drop_cancelled()
    return None


def test_owners_go_to_other_processes():
    seq = sequences("a", "7")[0]
    assert _unpacked(_packed(seq), no_constraint).owner == Owner("a", "7")


def no_constraint(packed):
    raise AssertionError(packed)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("01")), min_size=1, max_size=8))
def test_no_owner_changes_a_token(owners):
    told = []
    for given_owners in (owners, [("", "")] * len(owners)):
        target, drafter = FakeTarget(slots=2), NgramDrafter()
        engine = Engine(target, drafter, host_cycle(target, drafter, 3))
        seqs = [
            Sequence([3, 1, 4, n], Sampling(seed=n), max_tokens=9, owner=Owner(*owner))
            for n, owner in enumerate(given_owners)
        ]
        list(engine.run(seqs))
        told.append([seq.tokens for seq in seqs])
    assert told[0] == told[1]


ENDLESS = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True}


def ask(server: Server, key: str, **fields) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}/v1/completions", json=fields, headers=headers, timeout=60)


def waited_for(server: Server, count: int) -> None:
    deadline = time.monotonic() + 30
    while server.runner.running + server.runner.waiting < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("options", [{}, {"share_cache": True}])
def test_a_caller_that_fills_the_queue_shuts_no_other_out(options):
    target = ServedTarget(slots=1, pause=0.01)
    with (
        serving(target, k=0, max_waiting=8, api_keys=KEYS, **options) as server,
        ThreadPoolExecutor() as pool,
    ):
        flood = pool.submit(ask, server, "eins", **ENDLESS, n=9)
        waited_for(server, 9)
        assert ask(server, "eins", **ENDLESS).status_code == 429
        small = ask(server, "zwei", prompt="abc", max_tokens=2)
        assert small.status_code == 200 and not flood.done()
        assert server.runner.waiting >= 6
        server.runner.close()
        assert flood.result().status_code == 503


def test_another_request_of_the_caller_does_not_wait_for_all_choices():
    target = ServedTarget(slots=1, pause=0.01)
    with serving(target, k=0, max_waiting=64) as server, ThreadPoolExecutor() as pool:
        many = {"prompt": "abc", "max_tokens": 20, "ignore_eos": True, "n": 40}
        flood = pool.submit(server.post, "completions", **many)
        waited_for(server, 40)
        assert server.post("completions", prompt="abc", max_tokens=2).status_code == 200
        assert server.runner.waiting >= 30
        assert flood.result().status_code == 200
