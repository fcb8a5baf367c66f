"""On a GPU: a warm turn gives the same answer as a cold one, from device memory and host memory."""

from __future__ import annotations

from functools import cache
from random import Random

import pytest
import torch

from tests import warm_chats
from tests.lossless.warm_parts import WarmBench
from tests.warm_chats import Chats, Meeting, Turn

pytestmark = pytest.mark.gpu

KINDS = {"fp8": ("fp8", "fp8"), "bf16": ("bfloat16", "bfloat16"), "w8a8": ("fp8-w8a8", "fp8")}


@cache
def bench_of(kind: str, drafter: str) -> WarmBench:
    dtype, kv_dtype = KINDS[kind]
    return WarmBench("cuda", "mini", drafter, "cuda", dtype=dtype, kv_dtype=kv_dtype)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("kind", "drafter", "loop"),
    [
        ("fp8", "none", "device"),
        ("fp8", "suffix", "device"),
        ("fp8", "eagle3", "device"),
        ("fp8", "eagle3", "host"),
        ("bf16", "eagle3", "device"),
        ("w8a8", "model", "device"),
    ],
)
def test_warm_says_what_cold_says(kind, drafter, loop, temperature):
    counts = warm_chats.campaign(bench_of(kind, drafter), loop, temperature, range(8))
    assert counts.chats == 8 and counts.cached == counts.allowed > 0
    assert counts.accepted == counts.cold_accepted


def test_what_went_to_the_host_leaves_the_gpu_and_comes_back_the_same():
    from targets.cuda.host_blocks import SLAB, host_blocks

    bench, budget = bench_of("fp8", "eagle3"), 256 << 20
    met = Meeting(bench, bench.warm("device", 1 << 30, budget), bench.cold(), 1.0, Random(5))
    words = Chats(Random(6), bench.target.vocab, False).words
    prompt = words(700, 700)
    told = met.turn(Turn(prompt, strangers=0))
    torch.cuda.synchronize()
    before, held = torch.cuda.memory_allocated(), met.cache.pool.device_bytes
    assert held > 0
    while met.cache.give_way():
        pass
    torch.cuda.synchronize()
    assert before - torch.cuda.memory_allocated() >= held  # nothing of it stays behind
    assert (
        0
        < met.cache.pool.host_bytes
        <= host_blocks(bench.target.bias.device).taken
        <= budget + SLAB
    )
    met.turn(Turn(prompt + told + words(30, 30), strangers=0))
    assert met.counts.cached > 0


def test_memory_does_not_grow_over_many_turns():
    from targets.cuda.host_blocks import host_blocks

    bench = bench_of("fp8", "none")
    engine = bench.warm("device", 24 << 20, 128 << 20)
    met = Meeting(bench, engine, bench.cold(), 0.0, Random(5))
    words = Chats(Random(6), bench.target.vocab, False).words
    sizes = []
    for turn in range(200):
        met.run(engine, met.sequence(Turn(words(300, 900), max_tokens=2), turn))
        sizes.append((torch.cuda.memory_allocated(), host_blocks(bench.target.bias.device).taken))
    assert max(sizes[100:]) <= max(sizes[:100])
