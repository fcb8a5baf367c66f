"""On a GPU: rows of a picture see each other as in the reference, in decoding's kernels and by the
library; a picture's soft tokens have the same bits whatever was encoded before; and no drafter,
batch, loop or capture changes a token behind them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from drafters.eagle3.cuda.drafter import EagleDraftHead
from drafters.eagle3.cuda.head import HeadModel, arch_of, place
from drafters.eagle3.cuda.ops import DraftReference
from drafters.eagle3.spec import random_head
from drafters.ngram.host import NgramDrafter
from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.prefix_cache.cache import PrefixCache
from specdec.core.prefix_cache.pool import Budget, SnapshotPool
from specdec.core.types import Reuse, Sequence
from targets.arch import LayerSpec, Rope, released
from targets.backend import snapshots_of
from targets.cuda import attention, target as cuda_target
from targets.cuda.cache import KVCache, make_cache, read
from targets.cuda.host_drafter import DeviceHead, HostHead
from targets.cuda.kernels import Kernels
from targets.cuda.load import CudaOptions, load_target, random_target
from targets.cuda.ops import AttentionLayer, Rows
from targets.cuda.params import random_params
from targets.cuda.prefill import prefill
from targets.cuda.prefill_kernels import PrefillKernels
from targets.cuda.prefill_reference import PrefillReference
from targets.cuda.prefill_steps import PrefillChunk
from targets.cuda.reference import Reference
from targets.cuda.target import CudaTarget
from targets.vision.preprocessing import of_levels
from targets.vision.rows import SoftTokens
from targets.vision.spec import read_vision
from tests.support.fakes import Noise, Oracle
from tests.support.modes import MODES
from tests.support.pictures import levels, prompt_of, words
from tests.targets.cuda.attention_cases import POSITIONS, Case, one_layer_of
from tests.targets.cuda.card import KINDS, Differences, error, randn
from tests.targets.cuda.gpu.card_targets import SPEC, table_of
from tools import picture_times, seeing_mini

pytestmark = pytest.mark.gpu

EPS = 1e-6
TOKENS = 24
SLIDING = LayerSpec(1024, 32, 16, 256, Rope(1e4, 128), False, None, 256, None)
SHORT = LayerSpec(128, 16, 8, 256, Rope(1e4, 128), False, None, 256, None)
SPANS = ((40, 320), (322, 400))
NEAR = {torch.bfloat16: 1e-2, torch.float8_e4m3fn: 2e-3}
"""Of attention, by the cache's dtype."""
CALLS = [
    pytest.param(layer, tokens, picture, id=f"{layer.window}-{tokens}")
    for layer, tokens, picture in (
        (SLIDING, 128, (20, 90)),
        (SLIDING, 384, (30, 310)),
        (SHORT, 128, (3, 125)),
    )
]
"""A layer, a call's tokens, and which of these are a picture's. A ring holds a call."""
TRUE = {"gemma-4-31b": True, "gemma-4-26b-a4b": True, "gemma-4-e4b": False}
"""Models of true size, and whether the rows of a picture see each other."""
LAYERS = 6
"""Of these: five sliding ones and a global one."""
CHUNK = 384
EACH = [
    ("gemma-4-31b", "fp8"),
    ("gemma-4-31b", "bfloat16"),
    ("gemma-4-31b", "int4"),
    ("gemma-4-26b-a4b", "fp8"),
    ("gemma-4-e4b", "fp8"),
]
TOLERANCE = {"fp8": 0.12, "bfloat16": 0.03, "int4": 0.05}
"""Of keys and values of all layers, relative to their size: inputs have 4 bits in FP8."""
ROUTED = 0.3
"""The same where a router picks another expert now and then."""
FULL = levels(672, 960)
"""It fills every budget."""
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


@pytest.mark.parametrize("kv", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("layer", "tokens", "picture"), CALLS)
def test_decodings_attention_knows_how_far_rows_see(layer, tokens, picture, kv, monkeypatch):
    arch = one_layer_of(layer)
    more = attention.reaching_variants(arch, int(kv == torch.float8_e4m3fn))
    ops = Kernels(arch, POSITIONS, kv, KINDS, more)
    case = Case(layer, kv, [0, 63, 700], ops.attention, "cuda")
    case.picture, found = picture, []
    for fused_from in (1, 10**9):
        monkeypatch.setattr(attention, "FUSED_FROM_CTAS", fused_from)
        case.fill()
        found.append(case.all_together(tokens))
    same = Differences()
    same.check(*found)
    assert same.none(), int(same.count)
    exact = case.exact(tokens)
    assert error(found[0], exact) <= NEAR[kv]
    rows = case.rows(tokens, case.starts, [0, 1, 2])
    own = rows.start[:, None] + torch.arange(tokens, device="cuda")
    causal = case.call(case.qkv(tokens), replace(rows, reach=own.int()))
    assert error(causal, exact) > 0.1


class Drawn:
    """An encoder whose rows are drawn by the picture's digest."""

    def __init__(self, spec, hidden):
        self.spec, self._hidden = spec, hidden

    def encode(self, picture):
        seed = int.from_bytes(picture.digest[:4], "big")
        return randn(picture.tokens, self._hidden, seed=seed).bfloat16()


def true_target(name, dtype):
    arch = released(name)
    arch = replace(arch, layers=arch.layers[:LAYERS], pictures_both_ways=TRUE[name])
    spec = replace(picture_times.spec_of(name), budget=280)
    target = random_target(arch, CudaOptions(1, 1024, dtype=dtype, chunk=CHUNK, vision=spec))
    return seeing(target, Drawn(spec, arch.hidden))


def seeing(target, encoder):
    target.soft_tokens, target.vision = SoftTokens(encoder), encoder.spec
    return target


def evened(weights):
    """With scores of size 1, where random weights have 16: there a query sees one key alone, and
    which one, roundings decide."""
    for layer in weights.layers:
        layer.q_norm.fill_(1 / 16)
    return weights


def kept(cache: KVCache, stop: int) -> torch.Tensor:
    """Keys and values of all layers, of positions before `stop` of slot 0."""
    layers = [layer for layer in cache.layers if layer is not None]
    parts = (part for layer in layers for part in read(layer, 0, 0, stop))
    return torch.cat([part.float().flatten() for part in parts])


@torch.inference_mode()
def by_torch(target, dtype, ids, placed):
    """The same weights in plain torch."""
    arch, ops = target.arch, Reference(target.arch)
    weights = evened(random_params(arch, dtype, "cuda", ops))
    cache = make_cache(arch, 1, 1024, 128, torch.bfloat16, "cuda", 1024)
    spans = ((placed.start, placed.stop),) if arch.pictures_both_ways else ()
    tokens = torch.tensor(ids, dtype=torch.int32, device="cuda")
    soft = ((placed.start, target.soft_tokens._encoder.encode(placed.picture)),)
    chunk = PrefillChunk(tokens, 0, 0, spans=spans)
    for _ in prefill(weights, arch, cache, chunk, ops, (), True, soft):
        pass
    return kept(cache, len(ids))


@pytest.mark.parametrize("budget", [70, 280])
@pytest.mark.parametrize(("name", "dtype"), EACH)
def test_one_call_of_true_size_is_near_torch(name, dtype, budget, monkeypatch):
    """And would not be, if rows of a picture saw each other less."""
    target = true_target(name, dtype)
    evened(target.weights)
    own = replace(target.vision, budget=budget)
    ids, (placed,) = prompt_of(own, words(20, 2), FULL, words(4, 3))
    assert placed.picture.tokens == budget

    def found():
        target.prefill(Sequence(list(ids), slot=0, pictures=(placed,)), 0, len(ids))
        return kept(target.cache, len(ids))

    exact = by_torch(target, dtype, ids, placed)
    apart = error(found(), exact)
    assert apart < (ROUTED if target.arch.moe else TOLERANCE[dtype])
    if target.arch.pictures_both_ways:
        monkeypatch.setattr(cuda_target, "sees_up_to", lambda a, b, _: [*range(a, b)])
        assert error(found(), exact) > 2 * apart


@pytest.mark.parametrize("budget", [70, 280])
@pytest.mark.parametrize(("name", "dtype"), EACH)
def test_a_call_of_true_size_has_the_same_bits(name, dtype, budget):
    """Again, behind other prompts, launched kernel by kernel, and warm."""
    target = true_target(name, dtype)
    own = replace(target.vision, budget=budget)
    ids, pictures = prompt_of(own, words(20, 2), FULL, words(CHUNK - budget, 3))
    other, others = prompt_of(target.vision, words(50, 4), ONE, words(200, 5))

    def said(by, ids, pictures, cache=None):
        everywhere = Reuse(partings=tuple(range(len(ids))))
        seq = Sequence(list(ids), max_tokens=4, pictures=pictures, reuse=everywhere)
        engine = Engine(by, NoDrafter(), host_cycle(by, NoDrafter(), 0), prefix_cache=cache)
        engine.run_to_end([seq])
        return seq, kept(by.cache, len(ids))

    first, exact = said(target, ids, pictures)
    eager = CudaTarget(target.plan, target.arch, target.weights, target.ops)
    owner = snapshots_of(target)
    warm = PrefixCache(owner.unit, [owner], SnapshotPool(Budget(1 << 30, 0)), "seed")
    ways = {
        "again": (target, None),
        "eager": (seeing(eager, target.soft_tokens._encoder), None),
        "cold": (target, warm),
        "warm": (target, warm),
    }
    for way, (by, cache_) in ways.items():
        said(target, other, others)
        seq, found = said(by, ids, pictures, cache_)
        assert seq.tokens == first.tokens, way
        assert torch.equal(found, exact), way
    assert seq.cached == CHUNK


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


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_an_eagle3_head_is_fed_a_pictures_rows(dtype):
    """Its entries are near those of plain torch, fed the same rows, and not near those of padding;
    and it changes no token."""
    from targets.cuda.device_loop import device_loop

    sizes = {"slots": 3, "max_len": 1024, "dtype": dtype, "features": SPEC.layers}
    target = load_target(folder(), CudaOptions(**sizes, vision=read_vision(folder())))
    head = random_head(SPEC)
    drafter = HostHead(EagleDraftHead(HeadModel(head, target), 4))
    plain = decode(target, NoDrafter(), host_cycle(target, NoDrafter(), 0), "greedy")
    assert decode(target, drafter, host_cycle(target, drafter, 4), "greedy") == plain
    captured = device_loop(target, DeviceHead(drafter), 4)
    assert decode(target, drafter, captured, "greedy") == plain
    ours, theirs, padded = entries_of(drafter.head.inputs.head, head, drafter)
    assert error(ours, theirs) < {"fp8": 0.06, "bfloat16": 0.02}[dtype]
    assert error(ours, padded) > 0.1


@torch.inference_mode()
def entries_of(model, head, drafter):
    """Keys and values of a prompt with a picture: as the drafter reads it, by plain torch, and by
    plain torch with padding at the picture's places."""
    target, found = model.target, []
    ids, pictures = prompt_of(target.vision, words(20, 2), ONE, words(4, 3))
    seq = Sequence(list(ids), slot=0, pictures=pictures)
    step = target.prefill(seq, 0, len(ids))
    drafter.prefill(seq, 0, len(ids), step)

    def kept_there():
        parts = read(model.layer.cache, 0, 0, len(ids) - 1)
        return torch.cat([part.double().flatten() for part in parts])

    found.append(kept_there())
    following = torch.tensor(ids[1:], device=target.device).clamp(min=0)
    rows = table_of(target)[following].bfloat16()
    merged, (placed,) = rows.clone(), pictures
    ((first, soft),) = step.pictures
    assert (first, len(soft)) == (placed.start, placed.picture.tokens)
    merged[placed.start - 1 : placed.stop - 1] = soft.bfloat16()
    model.ops = twin = DraftReference(arch_of(head.spec))
    model.weights = place(head, "float32", twin, target.device)
    numbers = torch.arange(len(rows), device=target.device).int()[None]
    none = numbers[0, :1]
    for values in (merged, rows):
        table = twin.pack(values, None, "bf16", "plain")
        h = model.fuse(step.features[:, :-1].contiguous(), none)
        model.store(Rows(numbers, none, none), h, table)
        found.append(kept_there())
    return found


def test_choices_are_near_those_of_the_reference():
    """Float32 on a CPU: the first token behind each prompt has there a chance of its own."""
    card, exact = target_of("bfloat16", 1), target_of("float32", 1, device="cpu")
    cycle = host_cycle(exact, NoDrafter(), 0)
    theirs = decode(exact, NoDrafter(), cycle, "greedy")
    ours = decode(card, NoDrafter(), host_cycle(card, NoDrafter(), 0), "greedy")
    firsts = [theirs[i][-TOKENS] == ours[i][-TOKENS] for i in theirs]
    assert np.mean(firsts) >= 0.75
