"""The prefix cache on a target that can be calculated by hand: hits, insertions and evictions."""

from __future__ import annotations

import numpy as np
import pytest

from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.prefix_cache import cache as caches
from specdec.core.prefix_cache.keys import chain
from specdec.core.prefix_cache.pool import Budget, SnapshotPool
from specdec.core.types import Reuse, Sampling, Sequence
from tests.support.fakes import FakeTarget
from tests.support.fakes_snapshots import (
    CHUNK,
    RING,
    UNIT,
    FakeSnapshot,
    FakeSnapshots,
    cached_engine,
)


def answered(engine, tokens, reuse=Reuse(), max_tokens=6):  # noqa: B008
    """(cached, answer), which is that of a lone start."""
    seq = Sequence(list(tokens), Sampling(seed=3), max_tokens, reuse=reuse)
    engine.run_to_end([seq])
    target = FakeTarget(slots=1)
    lone = Sequence(list(tokens), Sampling(seed=3), max_tokens)
    Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 0)).run_to_end([lone])
    assert seq.tokens == lone.tokens
    return seq.cached, seq.tokens[seq.prompt_len :]


def words(count, seed=0):
    return np.random.default_rng(seed).integers(0, 50, count).tolist()


def test_a_turn_resumes_at_the_last_boundary_before_its_news():
    engine = cached_engine()
    prompt = words(30)
    assert answered(engine, prompt)[0] == 0
    assert answered(engine, words(40, 1))[0] == 0
    assert answered(engine, prompt + words(9, 2))[0] == 24
    assert answered(engine, prompt[:20] + words(9, 3))[0] == 16  # of the last two
    assert answered(engine, prompt[:10] + words(9, 4))[0] == 0  # no ring was kept there
    assert answered(engine, prompt[:10] + words(9, 5))[0] == 8  # prompts have parted there before
    assert (engine.prefix_cache.hits, engine.prefix_cache.queries) == (48, 176)


def test_a_prompt_is_never_wholly_read_from_the_cache():
    engine = cached_engine()
    prompt = words(24)
    assert [answered(engine, prompt)[0] for _ in range(2)] == [0, 16]


def test_the_boundary_at_a_parting_is_kept():
    engine, prompt = cached_engine(), words(60)
    answered(engine, prompt, Reuse(partings=(19,)))
    assert answered(engine, prompt[:19] + words(9, 1))[0] == 16


def test_a_prompt_that_is_nearly_all_kept_does_not_wait_as_a_long_one():
    engine, prompt = cached_engine(), words(63)
    answered(engine, prompt)
    cold, warm = Sequence(words(50, 1), max_tokens=2), Sequence(prompt, max_tokens=2, reuse=Reuse())
    engine.submit(cold)
    engine.step()
    engine.submit(warm)
    while not warm.emitted:
        engine.step()
    assert warm.cached == 56 and cold.prefilled < 20


def test_choices_of_one_prompt_share_it():
    engine, prompt = cached_engine(slots=4), words(30)
    seqs = [Sequence(list(prompt), Sampling(seed=i)) for i in range(4)]
    engine.run_to_end(seqs)
    assert [seq.cached for seq in seqs] == [0, 24, 24, 24]


def check_scopes(engine):
    prompt = words(30)
    for scope in ("", "a", "b"):
        assert answered(engine, prompt, Reuse(scope))[0] == 0
        assert answered(engine, prompt, Reuse(scope))[0] == 24


def check_last_tokens(engine):
    """Prompts that differ in any one token share no more than what is before it."""
    prompt = words(40)
    answered(engine, prompt, Reuse(partings=tuple(range(40))))
    for at in range(40):
        other = [token + (i == at) for i, token in enumerate(prompt)]
        found = answered(engine, other, Reuse(partings=tuple(range(40))))[0]
        assert found == min(at // UNIT * UNIT, 32)


def test_prompts_of_other_scopes_share_nothing():
    check_scopes(cached_engine())


def test_one_token_more_or_less_in_common():
    check_last_tokens(cached_engine())


def test_the_tests_find_a_scope_that_is_left_out(monkeypatch):
    honest = chain
    monkeypatch.setattr(caches, "chain", lambda seed, scope, *rest: honest(seed, "", *rest))
    with pytest.raises(AssertionError):
        check_scopes(cached_engine())


def test_the_tests_find_one_entry_too_many(monkeypatch):
    """Names that leave out each chunk's last token: two prompts share what only one of them is."""
    honest = chain

    def careless(seed, scope, tokens, unit, pictures):
        tokens = [0 if i % unit == unit - 1 else token for i, token in enumerate(tokens)]
        return honest(seed, scope, tokens, unit, pictures)

    monkeypatch.setattr(caches, "chain", careless)
    with pytest.raises(AssertionError):
        check_last_tokens(cached_engine())


def test_names_are_those_of_all_before_them_too():
    tokens = words(32)
    names = chain("model", "", tokens, UNIT)
    assert len(names) == 4 and all(len(name) == 32 for name in names)
    assert chain("model", "", tokens[:30], UNIT) == names[:3]
    for other in (("other", "", tokens), ("model", "x", tokens), ("mode", "l", tokens)):
        assert not {*chain(*other, UNIT)} & {*names}
    assert not {*chain("model", "", tokens[::-1], UNIT)} & {*names}


def test_a_request_may_neither_read_nor_leave_anything():
    engine, prompt = cached_engine(), words(30)
    assert answered(engine, prompt, None)[0] == 0
    assert answered(engine, prompt)[0] == 0  # nothing was left
    assert answered(engine, prompt, None)[0] == 0  # nothing is read
    assert engine.prefix_cache.queries == 30


def test_what_leaves_the_device_goes_to_the_host_and_is_read_there():
    engine, prompt = cached_engine(device=300), words(30)
    answered(engine, prompt)
    pool = engine.prefix_cache.pool
    for seed in range(3):
        answered(engine, words(30, 10 + seed))
        assert pool.device_bytes <= 300
    assert pool.host_bytes > 0
    assert answered(engine, prompt + words(5, 9))[0] == 24
    assert engine.prefix_cache.owners[0].from_host == 1


def test_without_any_memory_nothing_is_kept():
    engine, prompt = cached_engine(device=0, host=0), words(30)
    assert [answered(engine, prompt)[0] for _ in range(2)] == [0, 0]
    assert len(engine.prefix_cache.pool) == 0


@pytest.mark.parametrize(("device", "host"), [(10**6, 0), (0, 10**6), (1500, 4000)])
def test_chats_by_turns_over_fewer_slots_all_resume(device, host):
    """Eight chats over four slots: whatever can be read is."""
    engine, chats = cached_engine(4, device, host), [words(40, seed) for seed in range(8)]
    for turn in range(6):
        seqs = [Sequence(list(chat), Sampling(seed=3)) for chat in chats]
        engine.run_to_end(seqs)
        for i, seq in enumerate(seqs):
            most = 0 if turn == 0 else (len(chats[i]) - 25) // UNIT * UNIT
            assert seq.cached == most, (turn, i)
            chats[i] = seq.tokens + words(25 - seq.emitted, turn)


def test_memory_stays_within_its_bounds_and_does_not_grow():
    engine = cached_engine(2, device=2000, host=5000)
    pool, sizes = engine.prefix_cache.pool, []
    prompt = words(30)
    for turn in range(2000):
        seq = Sequence(list(prompt), Sampling(seed=3), max_tokens=2)
        engine.run_to_end([seq])
        fresh = turn % 7 == 0 or len(prompt) > 300
        prompt = words(30, turn) if fresh else seq.tokens + words(9, turn)
        assert pool.device_bytes <= 2000 and pool.host_bytes <= 5000
        sizes.append(len(pool))
    assert len(engine.prefix_cache._paths) == 0
    assert max(sizes[1000:]) <= max(sizes[:1000])


def test_a_conversation_that_goes_on_leaves_its_earlier_boundaries_first():
    """Two chats: one of few turns, then one of many. The older one is there still, for the longer
    one's earlier rings gave way before it: it takes those of two turns, and never more."""
    room = (2 * RING + 3 * CHUNK) + (4 * RING + 13 * CHUNK)
    engine, chat = cached_engine(device=room, host=0), words(30)
    answered(engine, chat)
    prompt = words(30, 1)
    for turn in range(6):
        _, answer = answered(engine, prompt)
        prompt = prompt + answer + words(10, 10 + turn)
    assert answered(engine, chat + words(5, 9))[0] == 24


class Cramped(FakeTarget):
    """Has no room for prompts while snapshots take more than it can spare."""

    engine: Engine
    spare = 250

    def prefill(self, seq, start, stop):
        if self.engine.prefix_cache.pool.device_bytes > self.spare:
            self.fed[seq.slot] = -5  # a chunk that was read in part
            raise MemoryError("no room")
        return super().prefill(seq, start, stop)

    def verify(self, seqs, draft):
        if self.engine.prefix_cache.pool.device_bytes > self.spare - 100:
            raise MemoryError("no room")
        return super().verify(seqs, draft)


@pytest.mark.parametrize("spare", [250, 0])
def test_snapshots_give_way_before_anything_is_refused(spare):
    target = Cramped(slots=2, chunk=4)
    target.spare = spare
    engine = target.engine = cached_engine(target=target)
    if spare == 0:
        target.verify = lambda seqs, draft: FakeTarget.verify(target, seqs, draft)
    for seed in range(4):
        answered(engine, words(60, seed), Reuse(partings=(20,)))
    assert engine.prefix_cache.pool.host_bytes > 0
    assert answered(engine, words(60, 3) + words(9, 8))[0] > 0


def test_a_moment_without_memory_costs_the_device_s_share_for_a_while_only(caplog):
    pool = SnapshotPool(Budget(device=10**6, host=0))
    pool.put("first", (FakeSnapshot(0, RING),))
    assert pool.give_way() and not pool.device_bytes and not pool.give_way()
    assert caplog.text.count("short of memory") == 1
    for number in range(3000):
        pool.put(number, (FakeSnapshot(0, RING),))
        assert pool.device_bytes <= RING // 2 + 50 * (number + 1)
    assert pool.device_bytes > 10**5


def test_what_fails_without_snapshots_fails():
    target = Cramped(slots=2, chunk=4)
    engine = target.engine = cached_engine(target=target)
    target.spare = -1
    seq = Sequence(words(30))
    events = list(engine.run([seq]))
    assert events[-1].error == "prefill: no room"


def test_a_snapshot_that_has_no_room_is_not_taken(monkeypatch):
    engine, prompt = cached_engine(), words(30)

    def refuse(seq, start, stop):
        raise MemoryError("no room")

    monkeypatch.setattr(engine.prefix_cache.owners[0], "take_chunk", refuse)
    assert [answered(engine, prompt)[0] for _ in range(2)] == [0, 0]


@pytest.mark.parametrize("device", [0, 5 * CHUNK])
def test_a_host_without_memory_fails_no_request(device, monkeypatch):
    """What it can't take is forgotten, and no more is moved there."""
    engine, prompt, tried = cached_engine(device=device), words(30), []

    def refuse(snapshot):
        tried.append(snapshot)
        raise MemoryError("no memory to lock")

    monkeypatch.setattr(FakeSnapshot, "to_host", refuse)
    for seed in range(4):
        answered(engine, words(30, seed))
    assert len(tried) == 1 and engine.prefix_cache.pool.host_bytes == 0
    assert answered(engine, prompt)[0] == 0


@pytest.mark.parametrize("device", [0, 200, 10**6])
def test_what_cannot_be_copied_back_is_read_anew(device, monkeypatch):
    """Once nothing that is kept can give way."""
    engine, prompt = cached_engine(device=device), words(30)
    answered(engine, prompt)
    cache, tried = engine.prefix_cache, []

    def refuse(seq, stop, chunks, boundary):
        tried.append(cache.pool.device_bytes)
        engine.target.fed[seq.slot] = -5  # written in part
        raise MemoryError("no room for a snapshot of a prompt")

    monkeypatch.setattr(cache.owners[0], "restore", refuse)
    assert [answered(engine, prompt)[0] for _ in range(3)] == [0, 0, 0]
    assert tried[-1] == 0 and cache.hits == 0
    monkeypatch.undo()
    assert answered(engine, prompt)[0] == 24


def left_after(engine, prompt, chunks, reuse=Reuse()):  # noqa: B008
    """A request that is cancelled once so many further prefill chunks are read."""
    seq = Sequence(list(prompt), Sampling(seed=3), reuse=reuse)
    engine.submit(seq)
    for _ in range(chunks):
        engine.step()
    seq.cancelled = True
    (event,) = engine.step()
    assert event.finish == "cancelled" and engine.idle
    return seq


def test_a_prompt_that_was_left_resumes_at_its_last_finished_chunk():
    engine, prompt = cached_engine(), words(100)
    assert left_after(engine, prompt, 6).prefilled == 24
    assert answered(engine, prompt)[0] == 24


def test_each_try_gets_further():
    engine, prompt, cached = cached_engine(), words(100), []
    for _ in range(5):
        cached.append(left_after(engine, prompt, 4).cached)
    assert cached == [0, 16, 32, 48, 64]


def test_a_prompt_that_was_left_within_a_chunk_leaves_no_boundary_there():
    engine, prompt = cached_engine(), words(100)
    assert left_after(engine, prompt, 5).prefilled == 20
    assert answered(engine, prompt)[0] == 0


def test_what_was_left_leaves_no_trace_where_it_must_not():
    engine, prompt = cached_engine(), words(100)
    left_after(engine, prompt, 6, reuse=None)
    assert not len(engine.prefix_cache.pool)
    left_after(engine, prompt, 0)
    assert not len(engine.prefix_cache.pool)
    left_after(engine, prompt, 6, Reuse("a"))
    assert answered(engine, prompt, Reuse("b"))[0] == 0


def test_what_was_left_is_the_first_to_go():
    engine, prompt = cached_engine(device=3 * RING + 30 * CHUNK, host=0), words(40)
    answered(engine, prompt)
    left_after(engine, words(40, 1), 4)
    answered(engine, words(12, 2))
    assert answered(engine, prompt + words(9, 3))[0] == 40


def test_what_was_left_and_has_no_room_fails_nothing():
    class Full(FakeSnapshots):
        def take_boundary(self, seq, stop):
            raise MemoryError

    engine = cached_engine()
    engine.prefix_cache.owners = (Full(engine.target),)
    left_after(engine, words(100), 6)
    assert answered(engine, words(100))[0] == 0


def test_what_host_memory_would_drop_again_is_never_copied_there():
    pool, copied = SnapshotPool(Budget(device=500, host=200)), []

    class Counted(FakeSnapshot):
        def to_host(self):
            copied.append(self.values)
            return super().to_host()

    for number in range(5):
        pool.put(number, (Counted(number, 100),))
    pool.budget.device = 0
    pool.put(5, (Counted(5, 300),))  # too large for the host's
    assert copied == [3, 4]
    assert [number in pool for number in range(6)] == [False] * 3 + [True] * 2 + [False]
