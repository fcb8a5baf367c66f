"""On two or four GPUs: a model that they share has one card's ids and log-probabilities.

The first layers of 12B at their true widths, with random weights: eight K/V heads of sliding layers
are divided, the one head of a global layer is on every card.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from drafters import registry
from drafters.kind import DraftRequest
from drafters.lookup.cuda import DeviceLookup
from drafters.model.kind import ModelDraft
from drafters.ngram.host import NgramDrafter
from drafters.none.host import NoDrafter
from specdec.core.config import ModelConfig
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.prefix_cache.cache import PrefixCache
from specdec.core.prefix_cache.pool import Budget, SnapshotPool
from specdec.core.types import Sequence
from targets.arch import released
from targets.backend import snapshots_of
from targets.cuda.backend import CudaBackend
from targets.cuda.cards import CardsCycle, CardsTarget, step_of
from targets.cuda.device_loop import device_loop
from targets.cuda.launch import Launcher
from targets.cuda.load import CudaOptions, load_target, random_target
from targets.cuda.load_cards import load_cards, random_cards
from targets.cuda.score import window_nll
from targets.cuda.selfcheck import self_check
from tests.support.constrained import EveryThird
from tests.support.modes import MODES
from tests.support.tiny import VARIANTS, write_tiny

pytestmark = pytest.mark.gpu
WHOLE = released("gemma-4-12b")
ARCH = replace(WHOLE, layers=WHOLE.layers[:12], vocab=8192)
LENGTHS = 3, 17, 60, 200, 400, 512, 700, 1020
"""Of prompts, in tokens."""
REPEATS = 60
DIVISIBLE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "global_head_dim": 128,
}
"""Sizes that cards can share, in place of the tiny model's."""


@cache
def target_of(cards, kv_dtype):
    if torch.cuda.device_count() < cards:
        pytest.skip(f"needs {cards} GPUs")
    options = CudaOptions(slots=8, max_len=1536, dtype="fp8", kv_dtype=kv_dtype, k=4, graphs=True)
    return random_target(ARCH, options) if cards == 1 else random_cards(ARCH, options, cards)


def requests(mode):
    found = []
    for i, length in enumerate(LENGTHS):
        text = np.random.default_rng(i).integers(3, ARCH.vocab, length)
        text = np.resize(text[: max(3, length // 4)], length)  # for lookups to find
        sampling = replace(MODES[mode](i), logprobs=3 if i % 3 == 0 else None)
        seq = Sequence(text.tolist(), sampling, max_tokens=24, request_id=str(i))
        seq.constraint = EveryThird() if i % 4 == 2 else None
        found.append(seq)
    return found


def answers(engine, mode):
    """Of each request: ids and log-probabilities."""
    seqs, details = requests(mode), {}
    for event in engine.run(seqs):
        assert event.error is None, event.error
        own = event.logprobs or (None,) * len(event.tokens)
        details.setdefault(event.sequence.request_id, []).extend(own)
    return [(seq.tokens, details[seq.request_id]) for seq in seqs]


def engines(target):
    yield Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 0))
    drafter = NgramDrafter()
    yield Engine(target, drafter, host_cycle(target, drafter, 4))
    lookup = step_of(target, lambda rank: DeviceLookup(rank, 2, 5))
    loop = CardsCycle if isinstance(target, CardsTarget) else device_loop
    yield Engine(target, NoDrafter(), loop(target, lookup, 4))


@cache
def ones(mode, kv_dtype):
    """One card's answers, with each loop."""
    return [answers(engine, mode) for engine in engines(target_of(1, kv_dtype))]


@pytest.mark.parametrize("cards", [2, 4])
@pytest.mark.parametrize("kv_dtype", ["fp8", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
def test_several_cards_have_one_cards_answers(mode, kv_dtype, cards):
    theirs = [answers(engine, mode) for engine in engines(target_of(cards, kv_dtype))]
    for other in [*ones(mode, kv_dtype), *theirs]:
        assert other == ones(mode, kv_dtype)[0]


@cache
def beside(cards, drafter):
    """A target and the drafter beside it. The draft model has the target's weights: its guesses are
    right."""
    if torch.cuda.device_count() < cards:
        pytest.skip(f"needs {cards} GPUs")
    kind, seed = registry.find(drafter), 1
    speculation = registry.config_type()(drafter=drafter, k=4)
    if drafter == "model":
        draft = ModelDraft(ARCH, None, (), greedy=False)
    else:
        draft = kind.random(DraftRequest(ARCH, None, speculation, random=True))
    sizes = {"slots": 8, "max_len": 4096, "dtype": "fp8", "kv_dtype": "fp8"}
    options = CudaOptions(**sizes, k=4, graphs=True, features=draft.features)
    if cards == 1:
        target = random_target(ARCH, options, seed)
    else:
        target = random_cards(ARCH, options, cards, seed)
    config = ModelConfig("random", backend="cuda", tp=cards, **sizes)
    return target, draft.place(CudaBackend(), target, config)


def drafted(cards, drafter, loop, mode):
    """Answers with a drafter, and every card's texts with the guesses behind them."""
    target, placed = beside(cards, drafter)
    own = placed.make(4)
    cycle = host_cycle(target, own, 4)
    if loop == "device":
        cycle = CudaBackend().device_loop(target, placed.on_device(own), 4)
    ranks = getattr(target, "ranks", (target,))
    for rank in ranks:
        rank.cache.tokens.zero_()
    found = answers(Engine(target, own, cycle), mode)
    return found, [rank.cache.tokens[:, : target.max_len].cpu() for rank in ranks]


@pytest.mark.parametrize("cards", [2, 4])
@pytest.mark.parametrize("loop", ["device", "host"])
@pytest.mark.parametrize("drafter", ["eagle3", "dflash", "assistant", "model"])
def test_drafters_with_weights_guess_on_several_cards_as_on_one(drafter, loop, cards):
    for mode in MODES:
        expected, (texts,) = drafted(1, drafter, loop, mode)
        found, each = drafted(cards, drafter, loop, mode)
        assert found == expected
        assert all(torch.equal(own, texts) for own in each)


@pytest.mark.parametrize("drafter", ["eagle3", "dflash", "model"])
def test_what_drafters_of_several_cards_keep_of_prompts(drafter):
    target, placed = beside(2, drafter)
    own = placed.make(4)
    unit = snapshots_of(target).unit
    kept = placed.snapshots(own, unit)
    owners = [snapshots_of(target), kept]
    pool = SnapshotPool(Budget(device=1 << 32, host=0))
    cycle = CudaBackend().device_loop(target, placed.on_device(own), 4)
    engine = Engine(target, own, cycle, prefix_cache=PrefixCache(unit, owners, pool, "seed"))
    text = np.random.default_rng(3).integers(3, ARCH.vocab, unit + 100).tolist()
    found = []
    for _ in range(2):
        seq = Sequence(list(text), max_tokens=24)
        engine.run_to_end([seq])
        found.append(seq.tokens)
    assert seq.cached == unit
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["fp8", "fp8-w8a8", "int4"])
@pytest.mark.parametrize("storage", ["bfloat16", "fp8"])
def test_several_cards_load_a_checkpoint_as_one_does(storage, dtype, tmp_path, monkeypatch):
    target_of(2, "fp8")  # or skips
    monkeypatch.setitem(VARIANTS, "31b", VARIANTS["31b"] | DIVISIBLE)
    write_tiny(tmp_path, "31b", storage)
    options = CudaOptions(slots=4, max_len=256, dtype=dtype, k=4, graphs=True)
    texts = []
    for target in (load_target(tmp_path, options), load_cards(tmp_path, options, 2)):
        drafter = NgramDrafter()
        seqs = [Sequence([2, 3, 4 + i] * 20, max_tokens=32) for i in range(4)]
        Engine(target, drafter, host_cycle(target, drafter, 4)).run_to_end(seqs)
        texts.append([seq.tokens for seq in seqs])
    assert texts[0] == texts[1]


def test_several_cards_pass_the_check_that_servers_begin_with():
    target = target_of(2, "fp8")
    assert all(check.passed for check in self_check(target))
    text = np.random.default_rng(5).integers(3, ARCH.vocab, 100).tolist()
    assert np.array_equal(window_nll(target, text), window_nll(target_of(1, "fp8"), text))


def bits(target):
    for rank in target.ranks:
        for layer in rank.cache.layers:
            for part in (layer.k, layer.v):
                yield part.view(torch.int16).clone()


def test_a_forward_is_the_same_each_time_beside_attention_with_little_cache(monkeypatch):
    """Attention's CTAs wait beside those of a linear layer, whose loads from shared memory then
    queue: a stage of its ring was once filled anew before it had been read."""
    launch = Launcher.__call__

    def little(self, variant, name, *rest, **options):
        launch(self, variant, name, *rest, **options | {"max_smem_carveout": name == "split"})

    monkeypatch.setattr(Launcher, "__call__", little)
    target = target_of(2, "bfloat16")
    seqs = requests("greedy")
    for slot, seq in enumerate(seqs):
        seq.slot, seq.constraint = slot, EveryThird()  # a constraint: nothing is captured
        target.prefill(seq, 0, seq.prompt_len)
        seq.tokens.append(77)
    nothing = np.empty((len(seqs), 0), np.int32)
    first = None
    for _ in range(REPEATS):
        target.verify(seqs, nothing)
        now = list(bits(target))
        first = first or now
        assert all(map(torch.equal, now, first))


SILENT = """
import numpy as np
from specdec.core.types import Sequence
from targets.cuda.cards import CardsTarget
from tests.targets.cuda.gpu.test_cuda_card_ranks import ARCH, target_of

target = target_of(2, "fp8")
seq = Sequence([7] * 60, slot=0)
target.prefill(seq, 0, 60)
seq.tokens.append(5)
alone = CardsTarget(ARCH, target.ranks[:1])
print("waits", flush=True)
alone.verify([seq], np.empty((1, 0), np.int32))
"""
"""Of two cards the second one is given nothing to do."""


def test_a_card_that_stays_silent_ends_the_process_with_one_line():
    target_of(2, "fp8")  # or skips
    child = [sys.executable, "-c", SILENT]
    ended = subprocess.run(child, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert ended.stdout == "waits\n"
    assert ended.stderr.splitlines()[-1].startswith("RuntimeError: a GPU waited 2 seconds in vain")
