"""On the card: a prompt of up to 1,024 tokens in one captured call has the bits of short calls, and
prompts that are read together those of each alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specdec.core.types import Sampling, Sequence
from targets import mini
from targets.arch import Arch, released
from targets.cuda.load import CudaOptions, load_target, random_target
from targets.cuda.ops import Rows
from targets.cuda.target import CudaTarget
from tests.targets.cuda.gpu.card_targets import stored

pytestmark = pytest.mark.gpu
KINDS = [("fp8", "bfloat16"), ("fp8", "fp8"), ("fp8-w8a8", "fp8"), ("int4", "bfloat16")]
MAX_LEN = 1100
LENGTHS = (65, 128, 129, 256, 300, 384, 385, 513, 767, 1000, 1024)


def text(length: int) -> list[int]:
    draw = torch.Generator().manual_seed(length)
    return torch.randint(5, 4000, (length,), generator=draw).tolist()


def logits_of(target: CudaTarget, rows: Rows, size: int) -> torch.Tensor:
    """Behind a prompt that is read in calls of `size` tokens."""
    *_, out = target._in_calls(rows, size)
    assert out is not None and out.logits is not None
    return out.logits


@pytest.mark.parametrize("name", ["mini", "mini-e"])
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_one_call_has_the_bits_of_calls_of_128(kind, name):
    dtype, kv_dtype = kind
    options = CudaOptions(3, MAX_LEN, dtype=dtype, kv_dtype=kv_dtype)
    target = load_target(mini.path(name), options)
    for length in LENGTHS:
        ids = text(length)
        with torch.inference_mode():
            rows = target._rows([ids], [0], [1])
            calls = logits_of(target, rows, 128)
            calls, parts = calls.clone(), stored(target, 1, length)
            whole = logits_of(target, rows, target.plan.first)
        # a last call of up to 64 tokens takes FP8 inputs as they are
        if length % 128 == 0 or length % 128 > 64 or dtype != "fp8":
            assert torch.equal(whole, calls), length
            now = stored(target, 1, length)
            assert all(torch.equal(a, b) for a, b in zip(now, parts, strict=True)), length


def test_a_prompt_is_the_same_beside_others_and_again():
    """Whatever the slot held, and whichever it is."""
    target = load_target(mini.path("mini"), CudaOptions(3, MAX_LEN, dtype="fp8"))
    for length in (400, 900):
        said = []
        for slot, before in ((0, 1000), (2, 300), (1, None)):
            if before:
                target.prefill(Sequence(text(before), slot=slot), 0, before)
            seq = Sequence(text(length), Sampling(logprobs=4), slot=slot)
            said.append(target.prefill(seq, 0, length))
        for step in said[1:]:
            assert (step.chosen == said[0].chosen).all()
            assert step.logprobs and said[0].logprobs
            assert (step.logprobs.top_logprobs == said[0].logprobs.top_logprobs).all()


def layers_of(name: str, count: int) -> Arch:
    """A released model's first layers."""
    arch = released(name)
    return replace(arch, layers=arch.layers[:count])


@pytest.mark.parametrize("dtype", ["fp8", "int4", "fp8-w8a8", "bfloat16"])
def test_a_mixtures_prompts_read_together_have_the_bits_of_each_alone(dtype):
    """Of every padded length, as many as one call reads and fewer, with random lengths in each."""
    options = CudaOptions(64, 600, dtype=dtype, kv_dtype="bfloat16")
    target = random_target(layers_of("gemma-4-26b-a4b", 6), options)
    draw = torch.Generator().manual_seed(7)
    for shortest, size in ((1, 16), (17, 64), (65, 128), (129, 256), (257, 512)):
        if target.together([size, size]) == [0]:
            continue
        most = len(target.together([size] * 64))
        for count in {2, min(3, most), most}:
            lengths = torch.randint(shortest, size + 1, (count,), generator=draw).tolist()
            seqs = [
                Sequence(text(n), Sampling(logprobs=4), slot=63 - i) for i, n in enumerate(lengths)
            ]
            steps = target.prefill_all(seqs)
            kept = [stored(target, s.slot, s.prompt_len) for s in seqs]
            for seq, step, kv in zip(seqs, steps, kept, strict=True):
                alone = target.prefill(seq, 0, seq.prompt_len)
                assert (step.chosen == alone.chosen).all(), (size, count, seq.prompt_len)
                assert step.logprobs and alone.logprobs
                assert (step.logprobs.top_logprobs == alone.logprobs.top_logprobs).all()
                now = stored(target, seq.slot, seq.prompt_len)
                assert all(torch.equal(a, b) for a, b in zip(now, kv, strict=True)), (size, count)
