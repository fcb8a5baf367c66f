"""On the card: a prompt of up to 1,024 tokens in one captured call has the bits of short calls."""

from __future__ import annotations

import pytest
import torch

from specdec.core.types import Sampling, Sequence
from targets import mini
from targets.cuda.cache import read
from targets.cuda.load import CudaOptions, load_target
from targets.cuda.target import CudaTarget

pytestmark = pytest.mark.gpu
KINDS = [("fp8", "bfloat16"), ("fp8", "fp8"), ("fp8-w8a8", "fp8"), ("int4", "bfloat16")]
MAX_LEN = 1100
LENGTHS = (65, 128, 129, 256, 300, 384, 385, 513, 767, 1000, 1024)


def text(length: int) -> list[int]:
    draw = torch.Generator().manual_seed(length)
    return torch.randint(5, 4000, (length,), generator=draw).tolist()


def stored(target: CudaTarget, slot: int, stop: int) -> list[torch.Tensor]:
    """Keys and values of all layers that later tokens see."""
    kept = []
    for spec, layer in zip(target.arch.layers, target.cache.layers, strict=True):
        if layer is not None:
            kept += read(layer, slot, max(0, stop - (spec.window or stop)), stop)
    return [part.float() for part in kept]


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
            calls = target._in_calls(rows, 128).logits
            assert calls is not None
            calls, parts = calls.clone(), stored(target, 1, length)
            whole = target._in_calls(rows, target.plan.first).logits
        # a last call of up to 64 tokens takes FP8 inputs as they are
        if length % 128 == 0 or length % 128 > 64 or dtype != "fp8":
            assert whole is not None and torch.equal(whole, calls), length
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
