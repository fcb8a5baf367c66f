"""Warm equals cold, bit for bit, on real caches: a short form of the campaign (warm_chats.py)."""

from __future__ import annotations

import resource
from functools import partial
from pathlib import Path
from random import Random

import pytest

from specdec.core.prefix_cache.cache import Key, PrefixCache
from specdec.core.prefix_cache.keys import chain
from specdec.core.prefix_cache.pool import SnapshotPool
from specdec.core.types import Reuse, Sampling, Sequence
from targets.cuda import prefill
from tests import warm_chats
from tests.lossless import warm_parts
from tests.lossless.warm_parts import WarmBench
from tests.warm_chats import Chats, Meeting, Turn

pytestmark = pytest.mark.usefixtures("cheap_programs")


@pytest.fixture(autouse=True, scope="module")
def short():
    """As many chunks as in the campaign, of half as many tokens."""
    sizes = {"CALLS": 4, "STRANGERS": 2, "STRANGERS_ANSWER": 4, "LONG_ANSWER": 60, "PARTS": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_parts, "CHUNK", warm_parts.CHUNK // sizes["PARTS"])
        for name, value in sizes.items():
            patch.setattr(warm_chats, name, value)
        yield


warm_bench = partial(WarmBench, context=400)
"""As long as the longest of these texts: they are cut nowhere, and attention reads no more."""

TALK = 0
TOOLS = 1
EDITED = 2
MOVED = 3
EVICTED = 4
CROWDED = 5
LEFT = 6
WORDY = 7
"""These kinds of chats are in the order of `Chats.kinds`."""


@pytest.mark.parametrize(
    ("backend", "model", "drafter", "loop", "temperature", "chats"),
    [
        ("jax", "31b", "none", "host", 1.0, [TALK, WORDY, LEFT]),
        ("jax", "e2b", "ngram", "device", 0.0, [TOOLS, MOVED]),
        ("jax", "12b", "eagle3", "device", 1.0, [EDITED, EVICTED, LEFT]),
        ("jax", "e4b", "model", "host", 0.0, [CROWDED]),
        ("cuda", "31b", "eagle3", "host", 1.0, [EVICTED, LEFT]),
        ("cuda", "26b-a4b", "model", "host", 0.0, [EDITED]),
        ("jax", "31b", "assistant", "device", 1.0, [EVICTED]),
        pytest.param("jax", "31b", "dflash", "device", 1.0, [EVICTED], marks=pytest.mark.slow),
        ("cuda", "31b", "dflash", "host", 0.0, [LEFT]),
        pytest.param("cuda", "e4b", "assistant", "host", 1.0, [TALK], marks=pytest.mark.slow),
    ],
)
def test_warm_says_what_cold_says(backend, model, drafter, loop, temperature, chats):
    """Ids, log-probabilities and acceptance; and all that could be resumed from was."""
    counts = warm_chats.campaign(warm_bench(backend, model, drafter), loop, temperature, chats)
    assert counts.chats == len(chats) and counts.cached == counts.allowed > 0
    assert counts.accepted == counts.cold_accepted


@pytest.mark.parametrize("backend", ["jax", "cuda"])
def test_narrow_caches_are_kept_as_they_are(backend):
    narrow = {"kv_dtype": "int8"} if backend == "jax" else {"kv_dtype": "fp8", "dtype": "fp8"}
    bench = warm_bench(backend, "31b", "none", **narrow)
    assert warm_chats.campaign(bench, "host", 1.0, range(1)).cached > 0


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["ngram", "eagle3"])
def test_a_trained_model(drafter):
    """Texts with a meaning to the head: it accepts after a hit what it accepts without one."""
    counts = warm_chats.campaign(WarmBench("jax", "mini", drafter), "host", 0.0, range(8))
    assert counts.accepted == counts.cold_accepted


def test_eight_chats_by_turns_over_three_slots():
    """Whatever their earlier turns allow is found."""
    bench = warm_bench("jax", "31b", "none")
    warm, cold = bench.warm(), bench.cold()
    met, words = Meeting(bench, warm, cold, 1.0, Random(5)), Chats(Random(6), 200, False).words
    chats = [words(60, 200) for _ in range(8)]
    for turn in range(4):
        told, alone = ([met.sequence(Turn(c, max_tokens=6), 7) for c in chats] for _ in "ab")
        warm.run_to_end(told)
        cold.run_to_end(alone)
        assert [seq.tokens for seq in told] == [seq.tokens for seq in alone]
        allowed = [met.expected.cached(chat, ()) for chat in chats]
        assert [seq.cached for seq in told] == allowed and (min(allowed) > 0 or not turn)
        chats = [seq.tokens + words(10, 60) for seq in told]


@pytest.mark.slow
def test_memory_does_not_grow_over_two_thousand_turns():
    bench = warm_bench("jax", "31b", "eagle3")
    engine = bench.warm("device", 2 << 20, 8 << 20)
    met, sizes = Meeting(bench, engine, bench.cold(), 0.0, Random(5)), []
    words = Chats(Random(6), bench.target.vocab, False).words
    prompt = words(60, 120)
    for number in range(2000):
        seq, _ = met.run(engine, met.sequence(Turn(prompt, max_tokens=2), number))
        fresh = len(prompt) > 400 or number % 9 == 0
        prompt = words(60, 120) if fresh else seq.tokens + words(10, 40)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        sizes.append(pages * resource.getpagesize())
        assert met.cache.pool.device_bytes <= 2 << 20 and met.cache.pool.host_bytes <= 8 << 20
    assert max(sizes[1000:]) - max(sizes[:1000]) < 4 << 20


def told(engine, seq):
    """An answer's ids with their log-probabilities."""
    events = [event for event in engine.run([seq]) if event.sequence is seq]
    found = [each.logprob for event in events for each in event.logprobs or ()]
    return seq.tokens[seq.prompt_len :], found


def test_a_client_that_leaves_within_a_chunk_changes_no_later_answer(monkeypatch):
    """Layers before the part that was read last have written the next chunk over their rings."""
    monkeypatch.setattr(warm_parts, "CHUNK", 128)
    monkeypatch.setattr(prefill, "PART_TOKENS", 32)
    bench = WarmBench("cuda", "31b", "none", context=800)
    random = Random(1)
    prompt = [random.randrange(10, 300) for _ in range(600)]
    asked = partial(Sequence, sampling=Sampling(logprobs=0), max_tokens=4, reuse=Reuse("a"))
    cold, warm = bench.cold(), bench.warm()
    expected = told(cold, asked(list(prompt)))
    warm.submit(left := asked(list(prompt)))
    while left.prefilled < 128 or warm.scheduler.reading is not left:
        warm.step()
    left.cancelled = True
    assert told(warm, again := asked(list(prompt))) == expected
    assert left.finish == "cancelled"
    assert again.cached == 256


@pytest.fixture(scope="module", params=["jax", "cuda"])
def bench(request):
    return warm_bench(request.param, "31b", "none")


def meeting(bench: WarmBench) -> Meeting:
    return Meeting(bench, bench.warm(), bench.cold(), 1.0, Random(5))


def chat(met: Meeting) -> None:
    met.chat(Chats(Random(6), met.bench.target.vocab, False).talk(strangers=2))


def test_the_tests_find_a_ring_of_another_boundary(bench, monkeypatch):
    honest = SnapshotPool.__getitem__

    def swapped(self, key):
        others = (k for k in self._device.entries if k.kind == "boundary" and k != key)
        return honest(self, next(others) if key.kind == "boundary" else key)

    monkeypatch.setattr(SnapshotPool, "__getitem__", swapped)
    with pytest.raises(AssertionError, match="cold"):
        chat(meeting(bench))


def test_the_tests_find_a_chunk_too_many(bench, monkeypatch):
    """`resume` reports one chunk more than it restored."""
    honest = PrefixCache.resume

    def generous(self, seq):
        found = honest(self, seq)
        return found + self.unit * (0 < found < seq.prompt_len - self.unit)

    monkeypatch.setattr(PrefixCache, "resume", generous)
    with pytest.raises(AssertionError, match="cold"):
        chat(meeting(bench))


def test_the_tests_find_what_decoding_wrote(bench):
    """An answer's entries, kept as if they were a prompt's, have other bits."""
    met, words = meeting(bench), Chats(Random(6), bench.target.vocab, False).words
    prompt, unit = words(40, 40), met.cache.unit
    told = met.turn(Turn(prompt, max_tokens=100, strangers=0))
    # the cold run, which came last, left the same answer in the slot that is free now
    seq = Sequence(prompt + told, slot=met.cold.scheduler.free[-1])
    longer = prompt + told + words(20, 20)
    names = chain(met.cache.seed, "", longer, unit)[: len(seq.tokens) // unit]
    own = met.cache.owners[0]
    for number, name in enumerate(names):
        start = number * unit
        part = own.take_chunk(seq, start, start + unit)
        met.cache.pool.put(Key("chunk", name), (part,))
    last = len(names) * unit
    met.cache.pool.put(Key("boundary", names[-1]), (own.take_boundary(seq, last),))
    with pytest.raises(AssertionError, match="cold"):
        met.turn(Turn(longer, strangers=0))
