"""Without a GPU: weights lie where the kernels look, and binaries are kept."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from specdec.core.errors import UserError
from targets.arch import LayerSpec, released
from targets.cuda import (
    attention,
    four_bits,
    gemm,
    int8,
    launch,
    packing,
    tiles,
    w8a8,
)
from targets.cuda.four_bits import FourBits
from targets.cuda.inputs import BLOCKS, NARROW_BLOCKS
from targets.cuda.int4 import Int4
from targets.cuda.launch import Variant, cached_binary, compile_variant
from targets.cuda.load import CudaOptions, make_plan
from targets.cuda.nvfp4 import Nvfp4
from targets.cuda.ops import Linear
from tests.targets.cuda.card import linears
from tests.targets.cuda.kernel_variants import RELEASED

DTYPES = {"fp8": torch.float8_e4m3fn, "w8a8": torch.float8_e4m3fn, "bf16": torch.bfloat16}
LAYOUTS = ["plain", "row_parallel", "gated", "experts", "experts_gated"]
MADE = [(kind, layout) for kind in ("fp8", "bf16") for layout in LAYOUTS]
MADE += [("w8a8", "plain"), ("w8a8", "gated"), ("w8a8", "row_parallel")]


def test_a_kernel_that_does_not_compile_is_an_error(tmp_path):
    (tmp_path / "broken.cu").write_text("__global__ void k() { nonsense; }")
    with pytest.raises(UserError, match="broken.cu does not compile.*nonsense"):
        compile_variant(Variant("broken", folder=tmp_path))


def test_binaries_are_kept_until_something_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "SOURCES", tmp_path)
    header, source, folder = tmp_path / "any.cuh", tmp_path / "a.cu", tmp_path / "cache"
    header.write_text("")
    source.write_text('extern "C" __global__ void k() {}')
    first = cached_binary(Variant("a", folder=tmp_path), folder, 1)
    monkeypatch.setattr(launch, "compile_variant", lambda variant: b"new")
    assert cached_binary(Variant("a", folder=tmp_path), folder, 1) == first
    assert cached_binary(Variant("a", folder=tmp_path), folder, 2) == b"new"
    assert cached_binary(Variant("a", (("N", 1),), tmp_path), folder, 1) == b"new"
    header.write_text("// changed")
    assert cached_binary(Variant("a", folder=tmp_path), folder, 1) == b"new"


@pytest.mark.parametrize("damage", [b"", b"whole"[:3], b"whole", b"whale" + b"0" * 32])
def test_a_damaged_binary_is_compiled_again(tmp_path, monkeypatch, damage):
    made = []
    monkeypatch.setattr(launch, "compile_variant", lambda variant: made.append(1) or b"whole")
    (tmp_path / "a.cu").touch()
    folder, variant = tmp_path / "cache", Variant("a", folder=tmp_path)
    assert cached_binary(variant, folder, 1) == b"whole"
    (file,) = folder.iterdir()
    file.write_bytes(damage)
    assert [cached_binary(variant, folder, 1) for _ in range(2)] == [b"whole", b"whole"]
    assert len(made) == 2 and list(folder.iterdir()) == [file]


def test_no_two_processes_write_one_file(tmp_path, monkeypatch):
    """In containers each process has the number 1."""
    (tmp_path / "a.cu").touch()
    folder, variant, seen = tmp_path / "cache", Variant("a", folder=tmp_path), []
    replace = Path.replace

    def published(file: Path, place: Path) -> Path:
        seen.append(file)
        if len(seen) == 1:  # another one comes before this one is done
            cached_binary(variant, folder, 1)
        return replace(file, place)

    monkeypatch.setattr(launch, "compile_variant", lambda variant: b"whole")
    monkeypatch.setattr(Path, "replace", published)
    assert cached_binary(variant, folder, 1) == b"whole"
    assert len(set(seen)) == 2 and len(list(folder.iterdir())) == 1


processors = st.sampled_from([2, 5, 132])
"""Few make each one's share as deep as that of a weight of true size."""
shapes = st.tuples(
    st.integers(1, 900), st.one_of(st.integers(1, 250), st.integers(1, 32).map(lambda k: 8 * k))
).map(lambda shape: (shape[0], 8 * shape[1]))
made = st.sampled_from(MADE)


def draw(
    shape: tuple[int, int], kind: str, layout: str, processors: int
) -> tuple[Linear, torch.Tensor]:
    """A weight as the kernels keep it, and its values [E, n, k] as bytes [E, n, k, size]."""
    n, k = shape[0] * (2 if layout.endswith("gated") else 1), shape[1]
    size = tiles.VALUE_BYTES[kind]
    count = 3 if layout.startswith("experts") else 1
    raw = torch.randint(0, 256, (count, n, k, size), dtype=torch.uint8)
    values = raw.flatten(2).view(DTYPES[kind])
    if not layout.startswith("experts"):
        values = values[0]
    groups = tiles.k_groups(n, layout)
    data = packing.tile(values, kind, layout, groups, processors)
    return Linear(n, k, kind, data, None, layout, groups), raw


def untiled(weight: Linear, processors: int) -> torch.Tensor:
    """The inverse of `packing.tile`: [n, k], of experts [E * n, k], in the weight's dtype."""
    plan, n = tiles.schedule_of(weight, processors), weight.n
    rows = plan.ctas * plan.passes * plan.tiles * tiles.TILE
    sizes, order = packing._axes(plan, weight.kind, weight.layout)
    blocks = weight.data.view(torch.int32).view([sizes[axis] for axis in order])
    words = blocks.permute([order.index(axis) for axis in range(len(order))])
    words = words.reshape(-1, rows, packing._stored(plan) * tiles.VALUE_BYTES[weight.kind] // 4)
    if weight.layout in tiles.GATE_ROWS:
        halves = words.unflatten(1, (-1, 2, tiles.GATE_ROWS[weight.layout])).transpose(1, 2)
        words = halves.reshape(len(words), 2, rows // 2, -1)[:, :, : n // 2].flatten(1, 2)
    return words[:, :n].flatten(0, 1).contiguous().view(DTYPES[weight.kind])[:, : weight.k]


@settings(max_examples=60, deadline=None)
@given(shapes, made, processors)
def test_tiles_turn_back_into_rows(shape, made, processors):
    weight, raw = draw(shape, *made, processors)
    back = untiled(weight, processors).contiguous().view(torch.uint8)
    assert torch.equal(back, raw.flatten(0, 1).flatten(1))


@settings(max_examples=40, deadline=None)
@given(shapes, processors)
def test_a_head_lies_in_two_parts(shape, processors):
    """As `pair_of` in hidden.cuh finds them: of a CTA's step all codes with their scales, then all
    256ths."""
    n, k = shape
    head, _ = int8.quantise(torch.randn(n, k).bfloat16())
    plan = tiles.schedule(n, k, "int16", "plain", 1, processors)
    data = packing.tile_head(head, processors).flatten()
    each = plan.row_groups * plan.depth * plan.wide
    assert data.numel() == plan.passes * plan.steps * plan.ctas * each * (544 + 512)
    row, at = torch.randint(n, (200,)), torch.randint(k, (200,))
    weight = Linear(n, k, "int16", data, None)
    number = in_weight(weight, processors, row // 16, at // 32) // (544 + 512)
    step, tile = number // each * each * (544 + 512), number % each
    lane, half = row % 8 * 4 + at % 32 // 8, row % 16 // 8
    place = lane * 16 + at % 8 // 4 * 8 + half * 4 + at % 4
    codes = data[step + tile * 544 + place]
    fine = data[step + each * 544 + tile * 512 + place]
    scales = step + tile * 544 + 512 + row % 8 * 4 + half * 2
    scale = torch.stack([data[scales], data[scales + 1]], -1).view(torch.float16)[:, 0]
    narrow = head.narrow
    assert torch.equal(codes, narrow.codes[row, at]) and torch.equal(fine, head.fine[row, at])
    assert torch.equal(scale, narrow.scale[row, at // 32])


def tile_of(weight: Linear, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A row's tile, and its place there."""
    if not weight.layout.endswith("gated"):
        return row // 16, row % 16
    half, together = weight.n // 2, tiles.GATE_ROWS[weight.layout]
    # one warp holds both halves of a feature
    place = (row % half // together * 2 + row // half) * together + row % half % together
    return place // 16, place % 16


def in_weight(
    weight: Linear, processors: int, tile: torch.Tensor, block: torch.Tensor
) -> torch.Tensor:
    """Where a tile's 32 inputs begin, in bytes."""
    if weight.layout.startswith("experts"):
        return _in_moe(weight, tile, block)
    return _in_gemm(weight, tiles.schedule_of(weight, processors), tile, block)


@settings(max_examples=60, deadline=None)
@given(shapes, made, processors)
def test_every_value_is_where_the_kernels_look(shape, made, processors):
    """The addresses of gemm.cu, w8a8.cu and moe.cu, from a value's row and input."""
    kind, layout = made
    weight, raw = draw(shape, kind, layout, processors)
    tile, row = tile_of(weight, torch.arange(weight.n)[:, None])
    column = torch.arange(weight.k)
    block, lane = column // 32, row % 8 * 4 + column % 32 // 8
    size, value = tiles.VALUE_BYTES[kind], column % 8
    if kind != "bf16":
        within = lane * 16 + (value // 4 * 2 + row // 8) * 4 + value % 4
    else:
        word = value % 4 // 2 * 2 + row // 8
        within = value // 4 * 512 + lane * 16 + word * 4 + value % 2 * 2
    at = in_weight(weight, processors, tile, block) + within
    expert = torch.arange(len(raw))[:, None, None] * (weight.data.numel() // len(raw))
    data = weight.data.flatten()
    for byte in range(size):
        assert torch.equal(data[expert + at + byte], raw[..., byte])


@settings(max_examples=60, deadline=None)
@given(shapes, st.sampled_from(four_bits.KINDS), st.sampled_from(LAYOUTS), processors)
def test_codes_and_scales_are_where_the_kernels_look(shape, kind, layout, processors):
    """Those of 4-bit weights, as tile.cuh reads them: the values of the tiles are the weight's."""
    n, k = shape[0] * (2 if layout.endswith("gated") else 1), -(-shape[1] // 16) * 16
    lead = (3,) if layout.startswith("experts") else ()
    narrow = draw_codes((*lead, n, k), kind)
    groups = tiles.k_groups(n, layout)
    data = packing.tile_codes(narrow, layout, groups, processors)
    weight = Linear(n, k, narrow.kind, data, None, layout, groups)
    tile, row = tile_of(weight, torch.arange(n)[:, None])
    where = in_weight(weight, processors, tile, torch.arange(k) // 32)
    starts = torch.arange(max(1, *lead, 1))[:, None, None] * (data.numel() // max(1, *lead, 1))
    column = torch.arange(k) % 32
    if kind == "int4" and lead:
        meant = decoded_units(data.flatten().int(), starts + where, tile % 2, row, column)
    else:
        decode = decoded_floats if kind == "nvfp4" else decoded_integers
        meant = decode(data.flatten().int(), starts + where, row, column, kind)
    assert torch.equal(meant, narrow.values().view(-1, n, k))


def draw_codes(shape: tuple[int, ...], kind: str) -> FourBits:
    """Any codes, and scales of any size that the kind has."""
    *lead, k = shape
    draw = partial(torch.randint, generator=torch.Generator().manual_seed(lead[-1] * k))
    codes, row = draw(0, 16, shape, dtype=torch.uint8), torch.ones(lead)
    if kind == "nvfp4":  # all but NaN, 0x7f
        scale = draw(0, 127, (*lead, k // 16), dtype=torch.uint8)
        return Nvfp4(codes, scale.view(torch.float8_e4m3fn), row)
    groups = *lead, -(-k // 32)
    scale = draw(4, 11, groups).float().exp2() * (1 + draw(0, 128, groups) / 128)
    zero = draw(0, 16, groups, dtype=torch.uint8) if kind == "uint4" else None
    return Int4(codes, scale.half(), zero, row)


def decoded_integers(data, where, row, column, kind: str) -> torch.Tensor:
    """The values [E, n, k] of rows of tiles at `where` in the data, as tile.cuh makes them."""
    found = nibbles(data, where + (row % 8 * 4 + column // 8) * 8 + row // 8 * 4, column)
    middle = data[where + 288 + row % 8 * 2 + row // 8] if kind == "uint4" else 8
    scale = halves(data, where + 256 + (row % 8 * 2 + row // 8) * 2)
    return ((found - middle) * scale / 2**20).half()


def decoded_units(data, where, second, row, column) -> torch.Tensor:
    """The same for an expert's units: two tiles are interleaved, and codes are stored minus 8."""
    unit = where - second * 288
    word = unit + (row % 8 * 4 + column // 8) * 16 + second * 8 + row // 8 * 4
    found = (nibbles(data, word, column) ^ 8) - 8
    scale = halves(data, unit + 512 + row % 8 * 8 + second * 4 + row // 8 * 2)
    return (found * scale / 2**20).half()


def nibbles(data, word, column) -> torch.Tensor:
    """Of inputs `column` of a tile, from the words that have them."""
    value = column % 8
    return data[word + value % 2 * 2 + value // 4] >> (value // 2 % 2 * 4) & 15


def halves(data, at) -> torch.Tensor:
    """float16s of two bytes."""
    return (data[at] | data[at + 1] << 8).to(torch.uint16).view(torch.float16).float()


def decoded_floats(data, where, row, column, kind: str) -> torch.Tensor:
    """The same of NVFP4: of a word four shifts, or what two differ by."""
    lane, value = row % 8 * 4 + column // 8, column % 8
    bytes_ = [data[where + lane * 8 + row // 8 * 4 + i].long() << 8 * i for i in range(4)]
    word = sum(bytes_)
    pairs = torch.stack([word << 6, word << 9, word ^ word << 2, word ^ word >> 3])
    pair = pairs.gather(0, (value // 2).expand(word.shape)[None])[0]
    bits = (pair >> value % 2 * 16 & 0x8E00).to(torch.uint16).view(torch.float16)
    scale = data[where + 256 + lane // 2 * 2 + row // 8].to(torch.uint8)
    return bits * scale.view(torch.float8_e4m3fn).half()


def _in_gemm(
    weight: Linear, plan: tiles.Schedule, tile: torch.Tensor, block: torch.Tensor
) -> torch.Tensor:
    owner, place = tile // plan.tiles, tile % plan.tiles
    each = plan.steps * plan.depth  # blocks of a k group: contiguous, or every k_groups-th
    group, part = block % plan.k_groups, block // plan.k_groups
    if weight.layout == "row_parallel":
        group, part = block // each, block % each
    steps = (owner // plan.ctas * plan.steps + part // plan.depth) * plan.ctas + owner % plan.ctas
    warp = group * plan.row_groups + place // plan.wide
    before = (warp * plan.depth + part % plan.depth) * plan.wide + place % plan.wide
    return steps * plan.step_bytes(weight.kind) + before * tiles.TILE_BYTES[weight.kind]


def _in_moe(weight: Linear, tile: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    blocks = tiles.expert_inputs(weight.k) // 32
    return ((tile // 2 * blocks + block) * 2 + tile % 2) * tiles.TILE_BYTES[weight.kind]


@st.composite
def weights(draw) -> tuple[int, int, str]:
    """n, k and layout."""
    layout = draw(st.sampled_from(["plain", "row_parallel", "gated"]))
    n = draw(st.integers(1, 300_000)) * (2 if layout == "gated" else 1)
    return n, draw(st.integers(1, 30_000)), layout


@settings(max_examples=300, deadline=None)
@given(weights(), st.sampled_from(["fp8", "bf16", "int4"]), st.integers(1, 160))
def test_a_schedule_covers_the_weight_and_fits_the_machine(weight, kind, processors):
    (n, k, layout), groups = weight, tiles.k_groups(weight[0], weight[2])
    plan = tiles.schedule(n, k, kind, layout, groups, processors)
    needed = -(-(n // 2) // 8) if layout == "gated" else -(-n // 16)
    assert (plan.ctas - 1) * plan.passes * plan.tiles < needed
    assert needed <= plan.ctas * plan.passes * plan.tiles
    stored = plan.steps * plan.k_groups * plan.depth * 32
    assert tiles.padded_inputs(k) >= stored == tiles.padded_inputs(k, groups) >= k
    assert plan.row_groups * plan.wide == plan.tiles and plan.k_groups == groups
    assert plan.ctas <= processors and plan.warps <= tiles.WARPS[plan.wide]
    for block in BLOCKS:
        ring = gemm.few_stages if block in gemm.FEW else gemm.many_stages
        stages, shared = ring(plan, kind, block)
        assert stages >= 2 and shared <= launch.SHARED_LIMIT
        assert gemm.many_threads(plan, block) <= (16 if block == 128 else 13) * 32  # wide.cu's
        if block in gemm.FEW:
            more, shared = gemm.few_stages(plan, kind, block, max_smem_carveout=True)
            assert stages <= more <= plan.steps * plan.passes or more == stages
            assert shared <= launch.SHARED_LIMIT


def global_layer(name: str) -> LayerSpec:
    return next(layer for layer in released(name).layers if not layer.sliding)


def test_global_layers_with_few_kv_heads_have_more_lanes():
    lanes = {name: attention._lanes(global_layer(name)) for name in RELEASED}
    assert lanes == {
        "gemma-4-12b": 64,
        "gemma-4-26b-a4b": 32,
        "gemma-4-31b": 16,
        "gemma-4-e2b": 64,
        "gemma-4-e4b": 32,
    }
    sliding = [layer for name in RELEASED for layer in released(name).layers if layer.sliding]
    assert {attention._lanes(layer) for layer in sliding} == {16}


@pytest.mark.parametrize(
    ("batch", "tokens", "short", "far"),
    [
        (1, 1, (1, 4), (1, 4)),
        (1, 4, (1, 1), (4, 4)),
        (1, 8, (2, 1), (4, 2)),
        (8, 8, (4, 1), (4, 1)),
    ],
)
def test_a_columns_lanes_are_dealt_to_ctas_that_run_at_once(batch, tokens, short, far):
    """12B on 132 multiprocessors: tiles of rows, and CTAs of a column."""
    for entries, way in ((attention.FAR, short), (attention.FAR + 1, far)):
        layer = global_layer("gemma-4-12b")
        assert attention._spread(layer, batch, tokens, entries, 132) == way


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 1100), st.integers(1, 40), st.integers(0, 5000), st.sampled_from([64, 512]))
def test_no_more_lanes_see_keys_than_are_counted(window, tokens, start, dim):
    layer = replace(released("gemma-4-e4b").layers[0], window=window, head_dim=dim)
    oldest, newest = max(0, start - window + 1), start + tokens - 1
    chunk = 128 if dim == 64 and window > 512 else 64
    seen = {c % attention.LANES for c in range(oldest // chunk, newest // chunk + 1)}
    assert len(seen) <= attention.lanes_seen(layer, tokens)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**20 - 1), st.integers(1, 2**18), st.sampled_from([-2, 0, 2]))
@example(2**20 - 1, 1, 2)
@example(1_048_575 // 13 * 13 - 1, 13, 2)
def test_a_quotient_in_floats_is_a_whole_number(value, by, wrong):
    """common.cuh's, with the most that CUDA's fast division may be wrong by, in units of the last
    place: `value` and the two beside its multiple of `by`."""
    edge = value // by * by
    for v in {value, edge, max(edge - 1, 0)}:
        near = np.float32((v + 0.5) / by)
        assert int(near + np.float32(wrong) * np.spacing(near)) == v // by


def test_positions_that_the_kernels_cannot_divide_are_refused():
    endless = replace(released("gemma-4-31b"), max_position=1 << 21)
    for dtype in ("fp8", "int4"):
        with pytest.raises(UserError, match="--max-len must be up to 1000000 on a GPU"):
            make_plan(endless, CudaOptions(max_len=1_000_001), dtype)
    assert make_plan(endless, CudaOptions(max_len=1_000_000), "fp8").max_len == 1_000_000


@settings(max_examples=300, deadline=None)
@given(weights(), st.integers(1, 160), st.sampled_from(NARROW_BLOCKS), st.integers(1, 16))
def test_shares_of_e4m3_cover_the_weight_and_fit_the_kernel(weight, processors, block, blocks):
    n, k, layout = weight
    plan = tiles.schedule(n, k, "w8a8", layout, tiles.k_groups(n, layout), processors)
    apart = layout == "row_parallel"
    block = min(block, w8a8.AT_ONCE) if apart else block
    own = w8a8.share_out(plan, apart, block, blocks, processors)
    assert own.runs * own.run == plan.ctas * plan.passes * plan.row_groups
    assert plan.k_groups % own.share == 0
    assert own.take * plan.wide <= w8a8.WARPS * own.tiles_per_warp
    assert own.tiles_per_warp == 1 or block <= w8a8.AT_ONCE
    stages, shared = w8a8.ring(plan, own, block)
    assert stages >= 2 and shared <= launch.SHARED_LIMIT
    assert w8a8.threads(plan, own, block) <= 512


@pytest.mark.parametrize("name", RELEASED)
def test_sums_know_no_machine(name):
    """k groups, and where they are cut, are the same wherever a weight is dealt; what is cut along
    k has eight, for 2, 4 and 8 devices."""
    for n, k, kind, layout in linears(released(name), "fp8"):
        stored = layout if layout in ("gated", "row_parallel") else "plain"
        groups = tiles.k_groups(n, stored)
        plans = [tiles.schedule(n, k, kind, stored, groups, p) for p in (78, 114, 132, 144)]
        assert len({(plan.k_groups, plan.steps * plan.depth) for plan in plans}) == 1
        if layout == "row_parallel":
            assert groups == tiles.EIGHTHS
