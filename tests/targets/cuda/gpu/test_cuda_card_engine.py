"""On the card: the captured cycle gives plain decoding's text in any batch and order of arrival."""

from __future__ import annotations

from ctypes import c_int
from functools import cache, partial

import numpy as np
import pytest
import torch

from drafters.ngram.host import NgramDrafter
from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.script import drawn_right
from specdec.core.types import Event, Sampling, Sequence, Speculative
from targets import mini
from targets.cuda.launch import Launcher, Library, Variant, pointer
from targets.cuda.load import CudaOptions, load_target
from tests.support.modes import MODES
from tests.support.scripts import ANSWERS, SHARES, decode_script

pytestmark = pytest.mark.gpu
UNREACHED = 10**6


@cache
def target_of(slots, max_len=512, name="mini", graphs=True):
    options = CudaOptions(slots=slots, max_len=max_len, dtype="fp8", graphs=graphs)
    return load_target(mini.path(name), options)


@cache
def captured(slots, k=4, max_len=512, name="mini"):
    """One cycle for all tests of a shape: its graphs, and what former rows left behind."""
    from drafters.lookup.cuda import DeviceLookup
    from targets.cuda.device_loop import device_loop

    target = target_of(slots, max_len, name)
    return device_loop(target, DeviceLookup(target, 2, 5), k)


def engine_of(slots, k=4, max_len=512, name="mini"):
    target = target_of(slots, max_len, name)
    return Engine(target, NoDrafter(), captured(slots, k, max_len, name))


def plain(seq, max_len=512, name="mini"):
    """The same request alone: one slot, launched kernel by kernel; its tokens and its events."""
    target = target_of(1, max_len, name, graphs=False)
    engine = Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 0))
    text = seq.tokens[: seq.prompt_len]
    twin = Sequence(text, seq.sampling, max_tokens=seq.max_tokens, stop_ids=seq.stop_ids)
    return twin.tokens, list(engine.run([twin]))


def prompt(seed, length, vocab=4096):
    """A prompt that repeats its first two thirds, for prompt lookup to find."""
    random = np.random.default_rng(seed)
    return np.resize(random.integers(3, vocab, max(1, length * 2 // 3)), length).tolist()


def run(engine) -> list[Event]:
    events = []
    while not engine.idle:
        events += engine.step()
    return events


def test_more_stop_ids_than_the_device_knows():
    """The device goes on after a stop id that it doesn't check; the engine cuts there, and the slot
    is reused."""
    endless = Sequence(prompt(1, 20), max_tokens=40)
    said = plain(endless)[0][20:]
    last = max(said[5:], key=lambda token: (said.index(token) >= 5, token))
    others = [token for token in range(3, last) if token not in said][:24]
    assert len(others) == 24 and last > max(others)
    engine = engine_of(1)
    first = Sequence(prompt(1, 20), max_tokens=40, stop_ids=frozenset([*others, last]))
    known = Sequence(prompt(1, 20), max_tokens=40, stop_ids=frozenset([last]))
    behind = Sequence(prompt(2, 9), MODES["nucleus"](2), max_tokens=30)
    for seq in (first, known, behind):
        engine.submit(seq)
    run(engine)
    assert first.finish == known.finish == "stop" and first.tokens == known.tokens
    for seq in (first, known, behind):
        assert seq.tokens == plain(seq)[0]


@pytest.mark.parametrize("mode", MODES)
def test_a_slot_that_is_reused_while_its_cycle_is_pending(mode):
    engine = engine_of(2)
    gone, stays, comes = (
        Sequence(prompt(seed, 30 + seed), MODES[mode](seed), max_tokens=40) for seed in (3, 4, 5)
    )
    for seq in (gone, stays, comes):
        engine.submit(seq)
    while gone.emitted < 8:
        engine.step()
    slot, gone.cancelled = gone.slot, True
    events = engine.step()  # a cycle in which `gone` runs is under way
    assert gone.finish == "cancelled" and comes.slot == slot
    events += run(engine)
    assert not any(event.sequence is gone for event in events[1:])
    for seq in (stays, comes):
        assert seq.finish == "length" and seq.tokens == plain(seq)[0]


@pytest.mark.parametrize("k", [4, 31])
def test_rows_come_to_the_end_of_their_context(k):
    """Drafts reach beyond it; a second text in each slot does not see what they left."""
    engine = engine_of(3, k, max_len=96)
    seqs = [Sequence(prompt(i, 50 + 9 * i), max_tokens=UNREACHED) for i in range(6)]
    for seq in seqs:
        engine.submit(seq)
    run(engine)
    for seq in seqs:
        assert seq.finish == "length" and len(seq.tokens) == 96
        assert seq.tokens == plain(seq, max_len=96)[0]


def test_logprobs_of_a_row_that_joins_and_leaves():
    engine = engine_of(3)
    asks = Sampling(temperature=0.8, seed=7, logprobs=3)
    silent = [Sequence(prompt(i, 12 + i), MODES["nucleus"](i), max_tokens=60) for i in range(2)]
    curious = Sequence(prompt(9, 15), asks, max_tokens=12)
    for seq in silent:
        engine.submit(seq)
    while silent[1].emitted < 10:
        engine.step()
    engine.submit(curious)
    events = run(engine)
    assert curious.finish == "length" and min(seq.emitted for seq in silent) == 60
    assert all(e.logprobs is None for e in events if e.sequence is not curious)
    ours = [t for e in events if e.sequence is curious for t in e.logprobs or ()]
    tokens, alone = plain(curious)
    theirs = [t for e in alone for t in e.logprobs or ()]
    assert curious.tokens == tokens and len(ours) == 12
    assert ours == theirs
    for seq in silent:
        assert seq.tokens == plain(seq)[0]


@pytest.mark.parametrize("name", ["mini", "mini-e"])
def test_long_contexts(name):
    """Thousands of tokens: rings wrap many times, prompts take several chunks of both kinds."""
    engine = engine_of(3, 4, 4096, name)
    lengths = (2047, 3001, 3900, 4056)
    seqs = [
        Sequence(prompt(i, n), MODES["nucleus"](i), max_tokens=40) for i, n in enumerate(lengths)
    ]
    for seq in seqs:
        engine.submit(seq)
    run(engine)
    for seq in seqs:
        assert seq.finish == "length" and seq.tokens == plain(seq, 4096, name)[0]


@pytest.mark.parametrize("mode", ["greedy", "everything"])
def test_a_batch_that_grows_and_shrinks(mode):
    """From 1 row to 17 and back: each size of the captured batches, on the way up and down."""
    engine, sizes = engine_of(17), []
    inner = engine.cycle
    engine.cycle = lambda seqs, single: sizes.append(len(seqs)) or inner(seqs, single)
    seqs = [
        Sequence(prompt(i, 5 + 7 * i % 90), MODES[mode](i), max_tokens=200 + 9 * i)
        for i in range(17)
    ]
    for seq in seqs:
        engine.submit(seq)
        engine.step()
        engine.step()
    run(engine)
    assert max(sizes) == 17 and {1, 2, 4, 8, 16} < set(sizes) and sizes[-1] < 8
    for seq in seqs:
        assert seq.finish == "length" and seq.tokens == plain(seq)[0]


def test_a_script_is_said_by_the_captured_cycle():
    """With what lookup finds, with a recorded acceptance, with a prediction: as in the host loop,
    on slots that had other owners before."""
    from drafters.lookup.cuda import DeviceLookup
    from targets.cuda.device_loop import device_loop

    target = target_of(2)

    def drive(script):
        return device_loop(target, DeviceLookup(target, 1, 3), 3, script)

    for right in (None, partial(drawn_right, SHARES, seed=1)):
        for predicted in (None, ANSWERS[0]):
            host = decode_script(target, NgramDrafter(1, 3), 3, right, predicted=predicted)
            assert decode_script(target, NgramDrafter(1, 3), 3, right, drive, predicted) == host
            assert host[0] == ANSWERS


def test_a_request_has_as_many_guesses_as_it_wants():
    """In the captured cycle as in the host loop, beside requests with a larger limit."""
    target = engine_of(3).target

    def texts(drafter, cycle, wishes):
        seqs = [Sequence(prompt(1, 40), MODES["nucleus"](i), max_tokens=40) for i in range(3)]
        for seq, k in zip(seqs, wishes, strict=True):
            seq.speculative = Speculative(k=k)
        Engine(target, drafter, cycle).run_to_end(seqs)
        return [seq.tokens for seq in seqs], [seq.acceptance.drafted_at for seq in seqs]

    host = NgramDrafter(2, 5)
    for wishes in ((None, None, None), (None, 0, 2), (0, 0, 0)):
        said = texts(host, host_cycle(target, host, 4), wishes)
        assert texts(NoDrafter(), captured(3), wishes) == said


DEEP = """extern "C" __global__ void deep(int* out, int n) {
  volatile int values[WORDS];
  for (int i = 0; i < WORDS; i++) values[i] = i * n;
  out[threadIdx.x] = values[(threadIdx.x * n) % WORDS];
}
"""


def run_deep(folder, words):
    """Run a kernel with thread stacks of `words` words."""
    (folder / "deep.cu").write_text(DEEP)
    variant, out = Variant("deep", (("WORDS", words),), folder), torch.zeros(32, device="cuda")
    launch = Launcher(Library({variant}, folder))
    launch(variant, "deep", (1, 1, 1), 32, [pointer(out), c_int(3)], pdl=False)
    torch.cuda.synchronize()


def test_graphs_outlive_what_changes_stacks(tmp_path):
    """A kernel with a larger stack than any before makes all stacks grow. A later load once made
    them small again, and captured graphs failed."""
    target = load_target(mini.path("mini"), CudaOptions(slots=1, max_len=512, dtype="fp8"))

    def said():
        engine = Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 0))
        asks = [Sampling(temperature=1.0, seed=i, logprobs=2) for i in range(5)]
        seqs = [Sequence(prompt(i, 5 + 31 * i), how, max_tokens=9) for i, how in enumerate(asks)]
        engine.run_to_end(seqs)
        return [seq.tokens for seq in seqs]

    run_deep(tmp_path, 1000)
    first = said()
    run_deep(tmp_path, 2000)
    assert said() == first
    load_target(mini.path("mini"), CudaOptions(slots=1, max_len=64, dtype="fp8"))
    assert said() == first
