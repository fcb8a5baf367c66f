"""Bytes of a CUDA target and of its steps, against figures known by hand; and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from specdec.core.errors import UserError
from targets.arch import LayerSpec, released
from targets.backend import meter_of
from targets.cuda import footprint, prefill_kernels, roofline
from targets.cuda.cache import entries
from targets.cuda.device import Machine, refuse
from targets.cuda.footprint import TargetShape, fitted, need
from targets.cuda.graphs import MOST_ROWS, bucket_of
from targets.cuda.load import SHORT, CudaOptions, load_target
from targets.cuda.prefill_kernels import PrefillKernels
from targets.cuda.prefill_steps import PrefillChunk
from targets.vision.preprocessing import Patches
from targets.vision.spec import PictureIds, VisionSpec
from tests.support.tiny import VARIANTS

SHAPE = TargetShape(slots=4, max_len=2048, width=5, chunk=2048, dtype="fp8", kv="bfloat16")
B31 = released("gemma-4-31b")
GIB = 2**30
IDS = PictureIds(1, 2, 3)


def test_weights_of_31b_by_hand():
    """30.70 billion parameters, of them 1.409 in the table, which has a scale for each 32, and half
    of which few rows read; other scales are a float32 a row."""
    scales = footprint.head_scale_bytes(B31, "bfloat16")
    assert scales / 1e9 == pytest.approx(1.409 * 2 / 32, rel=3e-2)
    codes = footprint.codes_bytes(B31, "bfloat16")
    assert codes / 1e9 == pytest.approx(1.409 * 34 / 32, rel=2e-3)
    for dtype, vocab in (("float32", B31.vocab), ("bfloat16", B31.vocab - 1)):
        other = replace(B31, vocab=vocab)
        assert footprint.head_scale_bytes(other, dtype) == footprint.codes_bytes(other, dtype) == 0
    bf16 = footprint.weight_bytes(B31, "bfloat16") - scales
    assert bf16 / 1e9 == pytest.approx(2 * 30.696, rel=1e-3)
    fp8 = footprint.weight_bytes(B31, "fp8") - scales
    assert fp8 / 1e9 == pytest.approx(30.696 + 1.409, rel=2e-3)


def test_cache_of_31b_by_hand():
    """50 rings of 1,024 + 128 entries of 16 x 256 and 10 caches of 2,048 + 128 of 4 x 512."""
    by_hand = 50 * 1152 * 16 * 256 + 10 * 2176 * 4 * 512
    text = 4 * (2048 + 128)
    assert footprint.cache_bytes(B31, SHAPE) == 4 * 2 * 2 * by_hand + 4 * text
    assert footprint.cache_bytes(B31, replace(SHAPE, kv="fp8")) == 4 * 2 * by_hand + 4 * text


def test_what_is_fed_for_pictures_is_counted():
    """31B: a row of 16 bits for each token of the graphs of 8 to 1,024."""
    assert footprint.picture_feed_bytes(B31, SHAPE) == 0
    seeing = replace(SHAPE, vision=VisionSpec(Patches(16, 3), 8, 8, 1e-6, None, IDS, 280, 280))
    assert footprint.picture_feed_bytes(B31, seeing) == 2 * 5376 * 3192
    short = replace(seeing, max_len=100)
    assert footprint.picture_feed_bytes(B31, short) == 2 * 5376 * (8 + 16 + 32 + 64 + 128)


@pytest.mark.parametrize(
    ("change", "rows", "prompts"),
    [
        ({}, 3192 + 3808, 10 + 6 * 4 + 2),
        ({"slots": 3}, 3192 + 3808, 10 + 6 * 4 + 2),  # three prompts are read as four
        ({"slots": 64}, 3192 + 8288, 10 + 126 + 30 + 14 + 6 + 2),
        ({"slots": 1, "max_len": 100}, 8 + 16 + 32 + 64 + 128, 5),
        ({"slots": 1, "dtype": "bfloat16"}, 8 + 16 + 32 + 64 + 128 + 256 + 384, 7),
        ({"dtype": "float32"}, 0, 0),  # the references are not captured
    ],
)
def test_what_graphs_of_prompts_keep_is_counted(change, rows, prompts):
    """Each has results of its own: a row of logits a prompt, features of all rows."""
    shape = replace(SHAPE, **change)
    assert footprint.graphs_rows(shape) == rows
    assert footprint.graphs_logit_bytes(B31, shape) == 4 * 262_144 * prompts
    more = need(replace(B31, vocab=B31.vocab + 32), shape).workspace - need(B31, shape).workspace
    verified = bucket_of(shape.slots) * shape.width
    masked = footprint.mask_bytes(B31, shape) // 8192  # of so many words, which become one more
    assert more == 4 * 32 * (3 * verified + shape.slots + prompts) + masked


def test_masks_of_guided_cycles_are_counted():
    """Each graph of one has masks of its own."""
    shape = replace(SHAPE, slots=64, width=16)
    masks = footprint.mask_bytes(B31, shape)
    assert masks == 4 * 262_144 // 32 * (1 + 2 + 4 + 8 + 16 + 32 + 48 + 64) * 16
    assert masks < need(B31, shape).workspace - footprint.RUNTIME
    assert footprint.mask_bytes(B31, replace(shape, slots=1)) == 32_768 * 16


def test_graphs_of_prompts_with_pictures_keep_as_much():
    vision = VisionSpec(Patches(16, 3), 8, 8, 1e-6, None, IDS, 280, 280)
    seeing = replace(SHAPE, vision=vision)
    assert footprint.graphs_rows(seeing) == 2 * 3192 + 3808
    assert footprint.graphs_logit_bytes(B31, seeing) == 4 * 262_144 * (20 + 6 * 4 + 2)


def test_a_copy_for_prefill_is_counted_and_its_scratch_is_not():
    """31B: a byte of each of 60 layers' values; a long chunk un-tiles nothing then."""
    sliding = 5376 * (32 * 256 + 2 * 16 * 256 + 32 * 256)
    dense = 3 * 5376 * 21504
    wide = 5376 * (32 * 512 + 4 * 512 + 32 * 512)
    copy = 50 * (sliding + dense) + 10 * (wide + dense)
    assert footprint.plain_bytes(B31, "fp8") == copy
    assert footprint.plain_bytes(B31, "int4") == footprint.plain_bytes(B31, "bfloat16") == 2 * copy
    with_copy, without = need(B31, replace(SHAPE, copied=True)), need(B31, SHAPE)
    assert with_copy.weights == without.weights + copy
    assert with_copy.workspace < without.workspace


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8", "fp8-w8a8"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_counted_is_what_a_target_holds(tiny, variant, dtype):
    """To the byte."""
    options = CudaOptions(slots=3, max_len=64, dtype=dtype, device="cpu")
    target = load_target(tiny[variant], options)
    counted = need(target.arch, TargetShape(3, 64, 5, target.plan.chunk, dtype, target.kv_dtype))
    assert _held(target.weights) == counted.weights
    assert _held(target.cache) == counted.cache


def _held(part: Any) -> int:
    """Bytes behind all tensors of a dataclass; a storage that two share counts once."""
    storages = (tensor.untyped_storage() for tensor in _tensors(part))
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def _tensors(part: Any) -> Iterator[torch.Tensor]:
    if isinstance(part, torch.Tensor):
        yield part
    elif is_dataclass(part) or isinstance(part, tuple):
        parts = part if isinstance(part, tuple) else (getattr(part, f.name) for f in fields(part))
        for inner in parts:
            yield from _tensors(inner)


def test_layers_that_share_keep_no_cache_but_read_one():
    e4b = released("gemma-4-e4b")
    owners = [layer for layer in e4b.layers if layer.kv_from is None]
    assert len(owners) == 24
    sliding = sum(layer.sliding for layer in e4b.layers)
    read = 2 * 2 * 2 * (sliding * 512 * 256 + (42 - sliding) * 8192 * 512)
    assert roofline.cache_bytes(e4b, "bfloat16", 1, 8192) == read
    stored = footprint.cache_bytes(e4b, SHAPE) - 4 * 4 * (2048 + 128)
    assert stored == sum(4 * 2 * 2 * _entries(layer) for layer in owners)


def _entries(layer: LayerSpec) -> int:
    return layer.kv_heads * layer.head_dim * entries(layer, 2048, slack=128, first=1024)


def test_what_fits_is_offered_and_does_fit():
    big = replace(SHAPE, slots=16, max_len=8192)
    for free in (36, 40, 46):
        with pytest.raises(UserError) as refused:
            fitted(B31, big, free * GIB)
        line = str(refused.value)
        assert "needs 57.3" in line and f"but {free}.0 GiB are free" in line and "\n" not in line
        for offer in _offers(line):
            fitted(B31, replace(big, **offer), free * GIB)
    assert fitted(B31, big, need(B31, big).total) is None


def test_pages_take_what_is_free_beside_the_rings():
    """31B in FP8 on an 80 GiB card: 64 slots of 131,072 tokens of which a text of 4,000 takes a
    page, 10 layers of 4 heads and 4,096 positions of 512 bytes, twice."""
    shape = TargetShape(64, 131_072, 5, 2048, "fp8", "fp8")
    page = 10 * 2 * 4 * 4096 * 512
    plan = fitted(B31, shape, 78 * GIB)
    assert plan is not None and plan.page == 4096 and plan.mapped
    assert plan.ahead == 64 and plan.needed(4_000) == 1
    held = need(B31, shape).total - 64 * 2 * 10 * 4 * 512 * plan.longest
    assert held + plan.total * page <= 78 * GIB < held + (plan.total + 1) * page * 8 / 7
    assert plan.texts(4_000, 64) == 64 and plan.total >= plan.needed(131_072)


def _offers(line: str) -> list[dict[str, int]]:
    """The alternatives that a refusal names, as changes of a Shape."""
    offered = line.rsplit(": ", 1)[1].removesuffix(" would fit")
    words = [alternative.split() for alternative in offered.split(" or ")]
    return [{w[i][2:].replace("-", "_"): int(w[i + 1]) for i in range(0, len(w), 2)} for w in words]


def test_a_model_that_cannot_fit_says_what_would():
    with pytest.raises(UserError, match="--dtype fp8 would fit"):
        fitted(B31, replace(SHAPE, dtype="bfloat16"), 45 * GIB)
    with pytest.raises(UserError, match="larger one or a smaller model"):
        fitted(B31, SHAPE, 20 * GIB)


@pytest.mark.parametrize("top", [0, 1, 2, 7, 64])
def test_largest_finds_the_edge(top):
    for edge in range(top + 1):
        assert footprint.largest(lambda n, edge=edge: n <= edge, top) == edge


H200 = Machine("2.13.0", "13.0", "NVIDIA H200", (9, 0))


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (Machine(None, None, None), ["needs torch", ".[cuda]"]),
        (Machine("2.13.0+cpu", None, None), ["without CUDA"]),
        (Machine("2.13.0", "13.0", None), ["no NVIDIA GPU", "--device cpu"]),
        (replace(H200, gpu="NVIDIA A100", capability=(8, 0)), ["A100", "8.0", "9.0"]),
        (replace(H200, missing=("cuda-bindings", "NVRTC")), ["cuda-bindings, NVRTC"]),
    ],
)
def test_a_machine_without_a_part_is_told_in_one_line(machine, words):
    with pytest.raises(UserError) as refused:
        refuse(machine)
    line = str(refused.value)
    assert all(word in line for word in words) and "\n" not in line
    refuse(H200)


def test_bytes_of_a_step_of_31b():
    """32.1 GB with a bf16 head, 30.8 with the copy that few rows read; 440 MiB of K/V at context
    512."""
    for rows, read in ((1, 30.8), (5, 30.8), (64, 32.1)):
        assert roofline.weight_bytes(B31, "fp8", rows) / 1e9 == pytest.approx(read, rel=2e-3)
    assert roofline.cache_bytes(B31, "bfloat16", 1, 512) == 440 * 2**20
    assert roofline.cache_bytes(B31, "fp8", 3, 2048) == 3 * 480 * 2**20


def test_experts_are_read_as_they_are_picked():
    moe = released("gemma-4-26b-a4b").layers[0].moe
    assert moe is not None and (moe.experts, moe.top_k) == (128, 8)
    assert roofline.expert_share(moe, 1) == roofline.expert_share(moe, 1, False) == 1 / 16
    assert roofline.expert_share(moe, 2) == pytest.approx(1 - (15 / 16) ** 2)
    assert roofline.expert_share(moe, 16, expected=False) == 1.0
    one, many = (roofline.weight_bytes(released("gemma-4-26b-a4b"), "fp8", m) for m in (1, 10**4))
    assert one / 1e9 == pytest.approx(3.89, rel=5e-3)
    assert many / 1e9 == pytest.approx(25.2 + 0.74, rel=1e-2)


def test_lookup_tables_cost_their_rows():
    e4b = released("gemma-4-e4b")
    growth = roofline.weight_bytes(e4b, "fp8", 2) - roofline.weight_bytes(e4b, "fp8", 1)
    assert growth == 2 * (42 * 256 + 2560)


def test_the_references_are_timed_too():
    assert roofline.read_bandwidth("cpu") > 0
    samples = roofline.forward_samples(lambda: None, "cpu")
    assert len(samples) == roofline.GROUPS and min(samples) >= 0


def test_attentions_partial_results_are_counted_and_bounded():
    """Of a row one per lane and head; of many rows no more than a fixed room."""
    from targets.cuda.attention import partial_bytes

    sliding, wide = B31.layers[0], next(layer for layer in B31.layers if not layer.window)
    assert partial_bytes(wide, 8, 2048) == 16 * 8 * 32 * (512 + 2) * 4
    for layer in (sliding, wide):
        assert partial_bytes(layer, 8, 2048) < partial_bytes(layer, 10**6, 2048) < 160 << 20
    one = next(layer for layer in released("gemma-4-12b").layers if not layer.window)
    assert partial_bytes(one, 1, 2048) == 64 * 16 * (512 + 2) * 4
    assert partial_bytes(one, 10**6, 2048) == 128 * partial_bytes(one, 1, 2048)
    assert partial_bytes(wide, 10**6, 2**17) == 512 << 20  # one long row's lanes are dealt
    long = replace(SHAPE, max_len=131072)
    angles = 4 * (131072 - SHAPE.max_len) * (256 + 512)
    short, far = (
        max(partial_bytes(layer, SHORT, n) for layer in (sliding, wide))
        for n in (SHAPE.max_len, long.max_len)
    )
    chunk = replace(SHAPE, chunk=128), replace(long, chunk=128)
    grown = need(B31, chunk[1]).workspace - need(B31, chunk[0]).workspace
    assert grown == angles + far - short


@pytest.mark.parametrize("positions", [2_048, 32_768, 65_536, 131_072, 262_144])
def test_a_long_prompts_scores_are_counted(positions):
    """31B's global layers: of 16 queries of 32 heads the scores of all keys, and shares of half a
    float each; keys and values of 4 heads of 512."""
    sliding, wide = B31.layers[0], next(layer for layer in B31.layers if not layer.window)
    floats = max(24 << 20, 16 * 32 * positions * 3 // 2)
    assert prefill_kernels.room_of(wide, positions) == floats
    assert prefill_kernels.room_of(sliding, positions) == 24 << 20
    short, long = (replace(SHAPE, max_len=n, chunk=512) for n in (512, positions))
    grown = footprint.prefill_bytes(B31, long) - footprint.prefill_bytes(B31, short)
    assert grown == 4 * (floats - (24 << 20)) + 2 * 2 * (positions - 512) * 4 * 512


@pytest.mark.parametrize("positions", [1_500, 33_000, 49_152, 65_536, 131_072, 200_001, 262_144])
def test_a_chunk_takes_as_much_room_as_is_counted(positions, monkeypatch):
    """The last chunk of a prompt: its kernels and matmuls are left out, its room is not. All at
    once: block by block it would be taken anew for each."""
    taken = Mock(wraps=torch.empty)
    monkeypatch.setattr(prefill_kernels, "PrefillLauncher", Mock())
    monkeypatch.setattr(torch.ops.aten.bmm, "dtype_out", Mock())
    wide = next(layer for layer in B31.layers if not layer.window)
    tokens, groups = 512, wide.heads // wide.kv_heads
    q, k = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for shape in (
            (wide.kv_heads, tokens, groups, wide.head_dim),
            (prefill_kernels.padded_keys(positions), wide.kv_heads, wide.head_dim),
        )
    )
    text = torch.empty(tokens, dtype=torch.int32, device="meta")
    steps = PrefillKernels(PrefillChunk(text, positions - tokens, 0), 1e-6)
    monkeypatch.setattr(torch, "empty", taken)
    steps._wide(q, k, k, positions, None)
    sizes = [size for (size, *_), _ in taken.call_args_list if isinstance(size, int)]
    assert sizes == [prefill_kernels.room_of(wide, positions)]


def test_buckets_hold_every_batch_and_lie_closer_where_rows_cost():
    for rows in range(1, MOST_ROWS + 1):
        assert rows <= bucket_of(rows) < 2 * rows + (rows == 1)
        if rows > 32:
            assert bucket_of(rows) <= 1.5 * rows
    assert [bucket_of(n) for n in (1, 3, 16, 17, 33, 65, 129, 512)] == [
        1,
        4,
        16,
        32,
        48,
        96,
        192,
        512,
    ]
    assert bucket_of(MOST_ROWS + 1) == MOST_ROWS + 1


def test_a_cpu_tells_no_gpu_memory(tiny):
    target = load_target(tiny["31b"], CudaOptions(slots=1, max_len=64, device="cpu"))
    assert meter_of(target).memory() is None
