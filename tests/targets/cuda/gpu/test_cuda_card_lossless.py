"""On a GPU: no drafter, K, batch, loop or capture changes one token of the kernels' texts."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from drafters.ngram.host import NgramDrafter
from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.types import Sequence
from targets import mini
from targets.cuda.load import CudaOptions, load_target
from tests.support.fakes import Noise, Oracle
from tests.support.modes import MODES
from tests.targets.cuda.nvfp4_files import in_part, write_nvfp4

pytestmark = pytest.mark.gpu

TOKENS = 24
MAX_LEN = 512
LENGTHS = (3, 40, 170, 1, 26, 64, 128, 129, 400, 9, 17, 33, 2, 5, 77, 100)
"""Prompts of one token and of several chunks of the cache; short prefill and the library's."""
KINDS = [("mini", "bfloat16", "bfloat16"), ("mini", "fp8", "fp8"), ("mini-e", "fp8", "bfloat16")]
KINDS += [("mini", "fp8-w8a8", "fp8"), ("mini-e", "fp8-w8a8", "bfloat16")]
KINDS += [("mini", "int4", "fp8"), ("mini-e", "int4", "bfloat16")]
KINDS += [("mini in nvfp4", "int4", "fp8")]  # and in part FP8 and wide
CASES = [(kind, "nucleus") for kind in KINDS] + [(KINDS[1], m) for m in ("greedy", "everything")]


@cache
def target_of(name, dtype, kv_dtype, slots, graphs=True):
    options = CudaOptions(
        slots=slots, max_len=MAX_LEN, dtype=dtype, kv_dtype=kv_dtype, graphs=graphs
    )
    return load_target(path_of(name), options)


@cache
def path_of(name):
    source = mini.path(name.removesuffix(" in nvfp4"))
    if "nvfp4" not in name:
        return source
    folder = Path(tempfile.mkdtemp())
    write_nvfp4(source, folder, in_part)
    return folder


@cache
def prompts_for(vocab):
    random = np.random.default_rng(3)
    texts = [random.integers(3, vocab, n).tolist() for n in LENGTHS]
    texts[1] = (texts[1][:9] * 5)[:40]  # something for prompt lookup to find
    return texts


def decode(target, drafter, cycle, mode):
    engine = Engine(target, drafter, cycle)
    seqs = [
        Sequence(list(p), MODES[mode](i), max_tokens=TOKENS, request_id=str(i))
        for i, p in enumerate(prompts_for(target.vocab))
    ]
    for _ in engine.run(seqs):
        pass
    assert all(seq.finish == "length" for seq in seqs)
    return {seq.request_id: seq.tokens for seq in seqs}


def host_drafters(plain, vocab):
    return {
        "none": NoDrafter(),
        "ngram": NgramDrafter(),
        "right": Oracle(plain, 0, vocab),
        "wrong": Oracle(plain, 1, vocab),
        "random": Noise(vocab),
        "wild": Noise(vocab, wild=True),
    }


@pytest.mark.parametrize("slots", [1, 3, 8, 16])
@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_every_token_is_plain_decodings(kind, mode, slots):
    """Plain: one slot, launched kernel by kernel. 16 prompts of 24 tokens in each run."""
    from drafters.lookup.cuda import DeviceLookup
    from drafters.none.cuda import DeviceNone
    from targets.cuda.device_loop import device_loop

    lone = target_of(*kind, 1, graphs=False)
    plain = decode(lone, NoDrafter(), host_cycle(lone, NoDrafter(), 0), mode)
    target = target_of(*kind, slots)
    device = {
        "none": DeviceNone(),
        "ngram": DeviceLookup(target, 2, 5),
        "suffix": DeviceLookup(target, 2, 32),
    }
    for k in (0, 1, 4, 7):
        for name, drafter in device.items():
            cycle = device_loop(target, drafter, k)
            assert decode(target, NoDrafter(), cycle, mode) == plain, (name, k, "captured cycle")
        for name, drafter in host_drafters(plain, target.vocab).items():
            if k in (0, 4) or name in ("ngram", "right"):
                cycle = host_cycle(target, drafter, k)
                assert decode(target, drafter, cycle, mode) == plain, (name, k, "host loop")


@pytest.mark.parametrize("mode", MODES)
def test_eager_equals_captured(mode):
    """With a drafter, so that widths differ; graphs are replayed or each kernel launched."""
    eager = target_of(*KINDS[1], 3, graphs=False)
    captured = target_of(*KINDS[1], 3)
    drafter = NgramDrafter()
    texts = [decode(t, drafter, host_cycle(t, drafter, 4), mode) for t in (eager, captured)]
    assert texts[0] == texts[1]
