"""On a GPU: rows of a picture see each other as in the reference, a picture's soft tokens have the
same bits whatever was encoded before, and no drafter, batch, loop or capture changes a token behind
them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from drafters.ngram.host import NgramDrafter
from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.prefix_cache.cache import PrefixCache
from specdec.core.prefix_cache.pool import Budget, SnapshotPool
from specdec.core.types import Reuse, Sequence
from targets.arch import LayerSpec, Rope, released
from targets.backend import snapshots_of
from targets.cuda.cache import make_cache
from targets.cuda.load import CudaOptions, load_target
from targets.cuda.ops import AttentionLayer
from targets.cuda.prefill_kernels import PrefillKernels
from targets.cuda.prefill_reference import PrefillReference
from targets.cuda.prefill_steps import PrefillChunk
from targets.vision.preprocessing import of_levels
from targets.vision.spec import read_vision
from tests.support.fakes import Noise, Oracle
from tests.support.modes import MODES
from tests.support.pictures import levels, prompt_of, words
from tests.targets.cuda.card import randn
from tools import seeing_mini

pytestmark = pytest.mark.gpu

EPS = 1e-6
TOKENS = 24
SLIDING = LayerSpec(1024, 32, 16, 256, Rope(1e4, 128), False, None, 256, None)
SHORT = LayerSpec(128, 16, 8, 256, Rope(1e4, 128), False, None, 256, None)
SPANS = ((40, 320), (322, 400))
ONE = levels(600, 970)
OTHER = levels(240, 400, seed=1)


@pytest.mark.parametrize("start", [0, 700])
@pytest.mark.parametrize("layer", [SLIDING, SHORT])
def test_rows_of_a_picture_see_each_other(layer, start):
    """Spans longer than the window too, and a chunk that ends within none."""
    arch = replace(released("gemma-4-31b"), layers=(layer,))
    tokens = torch.zeros(450, dtype=torch.int32, device="cuda")
    chunk = PrefillChunk(tokens, start, 1, spans=SPANS)
    stores = [make_cache(arch, 2, 2048, 128, torch.bfloat16, "cuda").layers[0] for _ in "ab"]
    q_norm, k_norm = (1 + 0.1 * randn(layer.head_dim, seed=s) for s in (1, 2))
    vectors = layer.heads + 2 * layer.kv_heads
    qkv = (2 * randn(len(tokens), vectors * layer.head_dim)).bfloat16()
    found = []
    for make, given, store in zip(
        (PrefillKernels, PrefillReference), (qkv, qkv.float()), stores, strict=True
    ):
        steps, own = make(chunk, EPS), AttentionLayer(layer, store, q_norm, k_norm)
        found.append(steps.attend(given, own, steps.exchange(given, own), "bf16").values.float())
    ours, theirs = found
    assert ((ours - theirs).norm() / theirs.norm()).item() < 0.025
    causal = PrefillReference(replace(chunk, spans=()), EPS)
    own = AttentionLayer(layer, stores[1], q_norm, k_norm)
    other = causal.attend(qkv.float(), own, causal.exchange(qkv.float(), own), "bf16").values
    assert ((ours - other).norm() / other.norm()).item() > 0.1


@cache
def folder():
    import tempfile
    from pathlib import Path

    return seeing_mini.write(Path(tempfile.mkdtemp()) / "seeing")


@cache
def target_of(dtype, slots, graphs=True, device="cuda"):
    spec = read_vision(folder())
    sizes = {"slots": slots, "max_len": 1024, "dtype": dtype}
    if device == "cpu":
        sizes = {"slots": slots, "max_len": 1024}
    return load_target(folder(), CudaOptions(**sizes, device=device, graphs=graphs, vision=spec))


def test_soft_tokens_are_a_function_of_the_pixels():
    card, exact = (target_of("bfloat16", 1), target_of("float32", 1, device="cpu"))
    spec = card.vision
    for pixels in (ONE, OTHER, levels(1, 1), levels(20, 3000)):
        picture = of_levels(pixels, spec.budget, spec.patches)
        first = card.soft_tokens._encoder.encode(picture)
        card.soft_tokens._encoder.encode(of_levels(OTHER, spec.budget, spec.patches))
        for _ in range(2):  # captured, then replayed
            assert torch.equal(card.soft_tokens._encoder.encode(picture), first)
        theirs = exact.soft_tokens._encoder.encode(picture)
        error = (first.float().cpu() - theirs).norm() / theirs.norm()
        assert error < 0.03


def prompts(spec):
    return [
        prompt_of(spec, words(20, 2), ONE, words(4, 3)),
        prompt_of(spec, words(6, 1), OTHER, words(6, 1), ONE, words(6, 1)),
        prompt_of(spec, words(40, 4)),
        prompt_of(spec, words(400, 5), ONE, words(5, 6), ONE, words(2, 7)),
    ]


def decode(target, drafter, cycle, mode, picked=None, cache=None):
    engine, seqs = Engine(target, drafter, cycle, prefix_cache=cache), []
    for i, (ids, pictures) in enumerate(prompts(target.vision)):
        if picked is None or i in picked:
            own, everywhere = MODES[mode](i), Reuse(partings=tuple(range(len(ids))))
            more = {"request_id": str(i), "pictures": pictures, "reuse": everywhere}
            seqs.append(Sequence(list(ids), own, TOKENS, **more))
    engine.run_to_end(seqs)
    return {seq.request_id: seq.tokens for seq in seqs}


@pytest.mark.parametrize("mode", ["greedy", "everything"])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8", "int4"])
def test_no_drafter_changes_a_token(dtype, mode):
    from drafters.lookup.cuda import DeviceLookup
    from targets.cuda.device_loop import device_loop

    lone, plain = target_of(dtype, 1, graphs=False), {}
    for i in range(4):
        plain |= decode(lone, NoDrafter(), host_cycle(lone, NoDrafter(), 0), mode, {i})
    target = target_of(dtype, 3)
    for k in (1, 4, 7):
        captured = device_loop(target, DeviceLookup(target, 2, 5), k)
        assert decode(target, NoDrafter(), captured, mode) == plain, ("captured", k)
        for drafter in (
            NgramDrafter(),
            Oracle(plain, 0, target.vocab),
            Noise(target.vocab, wild=True),
        ):
            cycle = host_cycle(target, drafter, k)
            assert decode(target, drafter, cycle, mode) == plain, (type(drafter), k)


def test_a_warm_prompt_says_what_a_cold_one_says():
    target = load_target(
        folder(), CudaOptions(slots=3, max_len=1024, chunk=128, vision=read_vision(folder()))
    )
    cycle = host_cycle(target, NoDrafter(), 0)
    cold = decode(target, NoDrafter(), cycle, "greedy")
    own = snapshots_of(target)
    cache_ = PrefixCache(own.unit, [own], SnapshotPool(Budget(1 << 30, 0)), "seed")
    for _ in range(2):
        assert decode(target, NoDrafter(), cycle, "greedy", cache=cache_) == cold
    assert cache_.hits > 0


def test_choices_are_near_those_of_the_reference():
    """Float32 on a CPU: the first token behind each prompt has there a chance of its own."""
    card, exact = target_of("bfloat16", 1), target_of("float32", 1, device="cpu")
    cycle = host_cycle(exact, NoDrafter(), 0)
    theirs = decode(exact, NoDrafter(), cycle, "greedy")
    ours = decode(card, NoDrafter(), host_cycle(card, NoDrafter(), 0), "greedy")
    firsts = [theirs[i][-TOKENS] == ours[i][-TOKENS] for i in theirs]
    assert np.mean(firsts) >= 0.75
