"""A long prefill chunk on the card: each kernel, then the whole, against the torch path."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace

import pytest
import torch

from targets import mini
from targets.arch import LayerSpec, Rope, released
from targets.checkpoint import Checkpoint
from targets.cuda import four_bits, int4
from targets.cuda.cache import make_cache, read
from targets.cuda.footprint import plain_bytes
from targets.cuda.kernels import Kernels
from targets.cuda.ops import AttentionLayer, Closing, Linear, Opening
from targets.cuda.params import copied, load_params, random_params
from targets.cuda.prefill import prefill
from targets.cuda.prefill_kernels import PrefillKernels
from targets.cuda.prefill_reference import PrefillReference
from targets.cuda.prefill_steps import PrefillChunk, PrefillInput
from targets.cuda.reader import quantise_fp8
from targets.cuda.reference import Reference
from targets.cuda.tiles import ACTIVATION_SCALE
from targets.model_folder import read_arch
from tests.targets.cuda.nvfp4_files import as_nvfp4, in_part, write_nvfp4

pytestmark = pytest.mark.gpu
EPS = 1e-6
E4M3 = 2**-4
"""Half a step of e4m3, relative; BF16 likewise."""
BF16 = 2**-8
SLIDING = LayerSpec(1024, 32, 16, 256, Rope(1e4, 128), False, None, 256, None)
GLOBAL = LayerSpec(None, 32, 4, 512, Rope(1e6, 64), True, None, 256, None)
ODD = LayerSpec(20, 4, 2, 16, Rope(1e4, 8), False, None, 256, None)
NARROW_GLOBAL = LayerSpec(None, 4, 1, 128, Rope(1e6, 16), True, None, 256, None)
LONE = LayerSpec(None, 16, 1, 512, Rope(1e6, 64), True, None, 256, None)
UNSHARED = LayerSpec(None, 8, 2, 512, Rope(1e6, 64), False, None, 256, None)


def chunk_of(tokens, start=0, slot=0):
    return PrefillChunk(torch.zeros(tokens, dtype=torch.int32, device="cuda"), start, slot)


def both(chunk):
    return PrefillKernels(chunk, EPS), PrefillReference(chunk, EPS)


def randn(*shape, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda")


def same_input(ours, exact, kind):
    """Each value within half a step of what it was rounded to."""
    values, step = ours.values.float(), BF16
    if kind == "fp8":
        values, step = values * ours.scale[:, None], E4M3
        assert (exact.values.abs().amax(1) / ours.scale - 448).abs().max() < 1
    smallest = exact.values.abs().amax(1, keepdim=True) / 448 * 2**-9
    assert ((values - exact.values).abs() <= exact.values.abs() * step * 1.13 + smallest).all()


def error(ours, exact):
    return ((ours.float() - exact.float()).norm() / exact.float().norm()).item()


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("hidden", [5376, 48, 8192])
def test_turn(kind, hidden):
    kernels, library = both(chunk_of(133))
    post, pre, scalar = 1 + randn(hidden, seed=1), 1 + randn(hidden, seed=2), randn(1, seed=3)
    for dtype in (torch.bfloat16, torch.float32, None):
        branch = None if dtype is None else (3 * randn(133, hidden, seed=4)).to(dtype)
        for opening in (pre, None):
            h, exact = randn(133, hidden, seed=5), randn(133, hidden, seed=5)
            factor = None if branch is None else scalar
            how = Opening(opening, kind), Closing(branch, post, factor)
            ours, theirs = kernels.add_norm(h, *how), library.add_norm(exact, *how)
            assert (h - exact).abs().max() <= 1e-5 * exact.abs().max()
            same_input(ours, theirs, kind)


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("width", [21504, 80, 24576])
def test_gate(kind, width):
    kernels, library = both(chunk_of(77))
    gate_up = (3 * randn(77, 2 * width)).bfloat16()
    exact = library.gated(gate_up.float(), kind).values
    if kind == "fp8":  # it rounds to bf16 on its way
        exact = exact.bfloat16().float()
    same_input(kernels.gated(gate_up, kind), PrefillInput(exact, None), kind)


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("layer", [SLIDING, GLOBAL, ODD, NARROW_GLOBAL, LONE, UNSHARED])
@pytest.mark.parametrize("cuts", [(2048, 3248), (130, 131, 650), (1333, 1500, 2950)])
def test_attention(layer, cache, cuts):
    """Keys and values as the cache keeps them, and what the queries make of them, chunk by
    chunk: rings that wrap within one, starts off every grid."""
    arch = replace(released("gemma-4-31b"), layers=(layer,))
    stores = [make_cache(arch, 2, 3328, 128, cache, "cuda").layers[0] for _ in "ab"]
    q_norm, k_norm = (1 + 0.1 * randn(layer.head_dim, seed=s) for s in (1, 2))
    vectors = layer.heads + layer.kv_heads * (1 if layer.k_eq_v else 2)
    for start, stop in zip((0, *cuts), cuts, strict=False):
        steps = both(chunk_of(stop - start, start, 1))
        qkv = (2 * randn(stop - start, vectors * layer.head_dim, seed=start)).bfloat16()
        given = qkv, qkv.float()
        pairs = [
            s.exchange(g, AttentionLayer(layer, c, q_norm, k_norm))
            for s, g, c in zip(steps, given, stores, strict=True)
        ]
        count = len(pairs[1][0])
        for ours, theirs in zip(*pairs, strict=True):
            assert error(ours[:count], theirs) < 5e-3 and not ours[count:].any()
        for kind in ("bf16", "fp8"):
            ours, theirs = (
                s.attend(g, AttentionLayer(layer, c, q_norm, k_norm), p, kind)
                for s, g, c, p in zip(steps, given, stores, pairs, strict=True)
            )
            values = ours.values.float()
            if kind == "fp8":
                values = values * ours.scale[:, None]
            assert error(values, theirs.values) < (0.04 if kind == "fp8" else 0.025)
        seen = max(0, stop - (layer.window or stop)), stop
        for ours, theirs in zip(*(read(store, 1, *seen) for store in stores), strict=True):
            assert error(ours, theirs) < 5e-3
            assert theirs.float().any()
    for store in stores:
        assert not store.k[0].float().any() and not store.v[0].float().any()  # another's slot


@pytest.mark.parametrize("kind", ["fp8", "int4", "nvfp4", "bf16"])
def test_matmuls(kind):
    """Plain, gate and up at once, and by expert; one expert has no rows."""
    kernels, library = both(chunk_of(300))
    h, weight = randn(300, 512), randn(4, 384, 512, seed=1) / 16
    x = kernels.add_norm(h, Opening(torch.ones(512, device="cuda"), kind))
    values, scale = quantise_fp8(weight) if kind == "fp8" else (weight.bfloat16(), None)
    factor = 1 if x.scale is None else x.scale[:, None]
    if kind in ("int4", "nvfp4"):
        narrow = int4.quantise(weight) if kind == "int4" else as_nvfp4(weight)
        factor = ACTIVATION_SCALE
        values, scale = narrow.values(), narrow.row
    widened = x.values.float() * factor
    exact = PrefillInput(widened.to(torch.float32), None)
    ends = torch.tensor([100, 100, 117, 300], dtype=torch.int32, device="cuda")
    one = values[2], None if scale is None else scale[2]
    ours = kernels.matmul(x, one)
    assert error(ours, library.matmul(exact, one)) < 5e-3
    same = (
        kernels.gate_up(x, iter([(slice(0, 192), one)]), 192, kind),
        kernels.gated(ours, kind),
    )
    assert torch.equal(*(gated.values.view(torch.uint8) for gated in same))
    if kind in four_bits.KINDS:
        return
    every = values, scale
    ours = kernels.grouped(x, ends, every)
    assert error(ours, library.grouped(exact, ends, every)) < 5e-3
    assert (kernels.grouped(x, ends, every) == ours).all()


@pytest.mark.parametrize("name", ["mini", "mini-e"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("bfloat16", 0.03), ("fp8", 0.12), ("int4", 0.03), ("nvfp4", 0.03), ("nvfp4 in part", 0.12)],
)
def test_whole_prefill(tmp_path, name, dtype, tolerance):
    """nvfp4: a file's own 4 bits, else what the dtype makes of mini's."""
    path, kinds = mini.path(name), {"fp8", "bf16", "int8", "int4", "nvfp4"}
    if dtype.startswith("nvfp4"):
        write_nvfp4(path, tmp_path, *([in_part] if "part" in dtype else []))
        path, dtype = tmp_path, "int4"
    arch = read_arch(path)
    features = 0, len(arch.layers) - 1
    ids = torch.randint(3, arch.vocab, (700,), generator=torch.Generator().manual_seed(3))
    runs = []
    for ops in (Kernels(arch, 1024, torch.bfloat16, kinds), Reference(arch)):
        weights = load_params(Checkpoint(path, arch), arch, dtype, "cuda", ops)
        for _ in range(2):
            cache = make_cache(arch, 2, 1024, 128, torch.bfloat16, "cuda")
            outs = []
            for start, stop in ((0, 401), (401, 700)):
                chunk = PrefillChunk(ids[start:stop].int().cuda(), start, 1)
                outs += filter(None, prefill(weights, arch, cache, chunk, ops, features))
            runs.append(outs)
    ours, again, theirs, _ = runs
    for a, b, c in zip(ours, again, theirs, strict=True):
        assert (a.logits == b.logits).all() and (a.features == b.features).all()
        assert error(a.features, c.features) < tolerance
        assert error(a.logits.softmax(-1), c.logits.softmax(-1)) < 4 * tolerance


def linears(part):
    if isinstance(part, Linear):
        yield part
    elif is_dataclass(part):
        for field in fields(part):
            yield from linears(getattr(part, field.name))


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8", "fp8-w8a8", "int4"])
@pytest.mark.parametrize("name", ["e4b", "26b-a4b"])
def test_a_copy_in_plain_order_changes_no_bit(name, dtype):
    """And takes as many bytes as are counted for it."""
    whole = released(f"gemma-4-{name}")
    layers = tuple(replace(layer, kv_from=None) for layer in whole.layers[:2])
    arch = replace(
        whole, layers=layers, vocab=4096, per_layer_vocab=min(whole.per_layer_vocab, 4096)
    )
    kinds = {"bf16", "int8", "fp8", "w8a8", "int4"}
    ops = Kernels(arch, 1024, torch.bfloat16, kinds)
    weights = random_params(arch, dtype, "cuda", ops)
    copy = copied(weights, ops)
    ids = torch.randint(3, arch.vocab, (300,), generator=torch.Generator().manual_seed(3))
    runs = []
    for each in (weights, copy):
        cache = make_cache(arch, 2, 1024, 128, torch.bfloat16, "cuda")
        chunk = PrefillChunk(ids.int().cuda(), 0, 1)
        runs += filter(None, prefill(each, arch, cache, chunk, ops, (1,)))
    ours, theirs = runs
    assert torch.equal(ours.logits, theirs.logits) and torch.equal(ours.features, theirs.features)
    every = [weight.plain for part in (*copy.layers, copy.per_layer) for weight in linears(part)]
    held = [values for values in every if values is not None]
    assert (len(held) < len(every)) == ((name, dtype) == ("26b-a4b", "int4"))
    assert sum(values.nbytes for values in held) == plain_bytes(arch, dtype)
