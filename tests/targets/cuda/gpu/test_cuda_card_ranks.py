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

from drafters.lookup.cuda import DeviceLookup
from drafters.ngram.host import NgramDrafter
from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.types import Sequence
from targets.arch import released
from targets.cuda.cards import CardsCycle, CardsTarget, step_of
from targets.cuda.device_loop import device_loop
from targets.cuda.launch import Launcher
from targets.cuda.load import CudaOptions, random_target
from targets.cuda.load_cards import random_cards
from tests.support.constrained import EveryThird
from tests.support.modes import MODES

pytestmark = pytest.mark.gpu
WHOLE = released("gemma-4-12b")
ARCH = replace(WHOLE, layers=WHOLE.layers[:12], vocab=8192)
LENGTHS = 3, 17, 60, 200, 400, 512, 700, 1020
"""Of prompts, in tokens."""
REPEATS = 60


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
