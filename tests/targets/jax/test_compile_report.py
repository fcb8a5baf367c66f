# ruff: noqa: E501
"""What a compiled program moves is counted right: by hand, on small programs in HLO's own text."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from specdec.cli import main
from targets.arch import released
from targets.jax.blank_params import abstract_params
from targets.jax.estimate import CHIPS, estimate
from targets.jax.hlo import parse, shapes
from targets.jax.report import by_kind, rounds, summary
from targets.jax.roofline import weight_bytes
from targets.jax.traffic import traffic

LOOP = """HloModule scan

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%slice_and_dot (stack: s8[10,256,128], row: s32[], input: bf16[8,128]) -> f32[8,256] {
  %stack = s8[10,256,128]{2,1,0:T(32,128)(4,1)} parameter(0)
  %row = s32[] parameter(1)
  %input = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} parameter(2)
  %zero = s32[] constant(0)
  %cut = s8[1,256,128]{2,1,0} dynamic-slice(%stack, %row, %zero, %zero), dynamic_slice_sizes={1,256,128}
  %flat = s8[256,128]{1,0} bitcast(%cut)
  %wide = bf16[256,128]{1,0} convert(%flat)
  ROOT %dot = f32[8,256]{1,0} convolution(%input, %wide), dim_labels=bf_oi->bf
}

%store (cache: bf16[10,64,128], row: s32[], new: bf16[1,8,128]) -> bf16[10,64,128] {
  %cache = bf16[10,64,128]{2,1,0} parameter(0)
  %row = s32[] parameter(1)
  %new = bf16[1,8,128]{2,1,0} parameter(2)
  %zero = s32[] constant(0)
  ROOT %update = bf16[10,64,128]{2,1,0} dynamic-update-slice(%cache, %new, %row, %zero, %zero)
}

%body (carry: (s32[], s8[10,256,128], bf16[10,64,128], bf16[8,128])) -> (s32[], s8[10,256,128], bf16[10,64,128], bf16[8,128]) {
  %carry = (s32[], s8[10,256,128]{2,1,0}, bf16[10,64,128]{2,1,0}, bf16[8,128]{1,0:S(1)}) parameter(0)
  %i = s32[]{:S(6)} get-tuple-element(%carry), index=0
  %w = s8[10,256,128]{2,1,0} get-tuple-element(%carry), index=1
  %kv = bf16[10,64,128]{2,1,0} get-tuple-element(%carry), index=2
  %h = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%carry), index=3
  %product = f32[8,256]{1,0:S(1)} fusion(%w, %i, %h), kind=kOutput, calls=%slice_and_dot, backend_config={"estimated_cycles":"700"}
  %reduced = f32[8,256]{1,0:S(1)} all-reduce(%product), to_apply=%add, metadata={op_name="jit(f)/while/body/dot"}
  %new = bf16[1,8,128]{2,1,0:S(1)} convert(%h)
  %stored = bf16[10,64,128]{2,1,0} fusion(%kv, %i, %new), kind=kLoop, calls=%store
  %spill = f32[8,256]{1,0} copy(%reduced)
  %again = f32[8,256]{1,0:S(1)} copy(%spill)
  ROOT %next = (s32[], s8[10,256,128]{2,1,0}, bf16[10,64,128]{2,1,0}, bf16[8,128]{1,0:S(1)}) tuple(%i, %w, %stored, %h)
}

%condition (carry: (s32[], s8[10,256,128], bf16[10,64,128], bf16[8,128])) -> pred[] {
  %carry = (s32[], s8[10,256,128]{2,1,0}, bf16[10,64,128]{2,1,0}, bf16[8,128]{1,0}) parameter(0)
  %bound = s32[] BOUND
  %i = s32[]{:S(6)} get-tuple-element(%carry), index=0
  ROOT %less = pred[]{:S(6)} compare(%i, %bound), direction=LT
}

ENTRY %main (w: s8[10,256,128], kv: bf16[10,64,128], h: bf16[8,128]) -> (s32[], s8[10,256,128], bf16[10,64,128], bf16[8,128]) {
  %w = s8[10,256,128]{2,1,0} parameter(0), metadata={op_name="params.segments[0][0][\\'mlp\\'].values"}
  %kv = bf16[10,64,128]{2,1,0} parameter(1), metadata={op_name="cache.layers[0][0].k"}
  %h = bf16[8,128]{1,0:S(1)} parameter(2), metadata={op_name="feed"}
  %zero = s32[] constant(0)
  %start = (s32[], s8[10,256,128]{2,1,0}, bf16[10,64,128]{2,1,0}, bf16[8,128]{1,0:S(1)}) tuple(%zero, %w, %kv, %h)
  ROOT %loop = (s32[], s8[10,256,128]{2,1,0}, bf16[10,64,128]{2,1,0}, bf16[8,128]{1,0:S(1)}) while(%start), condition=%condition, body=%body, metadata={op_name="jit(f)/shard_map/while"}
}
"""
SCAN = LOOP.replace("BOUND", "constant(10)")
DYNAMIC = LOOP.replace("BOUND", "get-tuple-element(%carry), index=0")


def test_a_scan_reads_each_weight_once_and_writes_what_is_new():
    found = traffic(parse(SCAN))
    assert found.reads["params.segments[0][0]['mlp'].values"] == 10 * 256 * 128
    assert found.reads["cache.layers[0][0].k"] == 0  # updated in place
    assert found.reads["temporaries"] == 10 * 8 * 256 * 4  # the spill, read again
    assert found.written == 10 * (8 * 128 * 2 + 8 * 256 * 4)
    assert found.flops == 10 * 2 * 8 * 256 * 128
    assert found.cycles == 7000
    kinds = by_kind(found.reads)
    assert kinds == {"weights": 327680, "kv": 0, "other": 0, "temporaries": 81920}


def test_collectives_are_counted_per_layer():
    rows = summary(traffic(parse(SCAN)).collectives, layers=10)
    assert rows == [{"kind": "all-reduce", "bytes": 8192, "runs": 10.0, "per_layer": 1.0}]


def test_a_loop_that_depends_on_data_asks_for_its_trips():
    asked = []
    found = traffic(parse(DYNAMIC), lambda path: asked.append(path) or 3)
    assert asked == ["jit(f)/shard_map/while"]
    assert found.flops == 3 * 2 * 8 * 256 * 128
    with pytest.raises(AssertionError, match="trip count"):
        traffic(parse(DYNAMIC))


@pytest.mark.parametrize(
    ("text", "size", "space"),
    [
        ("bf16[10,4,256]{2,1,0:T(4,128)(2,1)}", 10 * 4 * 256 * 2, 0),
        ("s8[10,176,100]{2,1,0:T(32,128)(4,1)}", 10 * 192 * 128, 0),
        ("s8[100,176]{0,1:T(32,128)(4,1)S(1)}", 128 * 192, 1),
        ("f32[]{:T(128)S(6)}", 4, 6),
        ("pred[1000]{0:T(1024)}", 1024, 0),
        ("s4[16]{0}", 8, 0),
    ],
)
def test_padding_of_tiles_counts(text, size, space):
    (shape,) = shapes(text)
    assert (shape.bytes, shape.space) == (size, space)


@pytest.mark.parametrize(
    ("operation", "flops"),
    [
        (
            # a batch of 4 as a spatial dimension: each output meets its own input alone
            "f32[4,8,16] convolution(%a, %b), window={size=4 stride=3 pad=3_3 lhs_dilate=4}, "
            "dim_labels=0bf_0oi->0bf",
            4 * 2 * 8 * 16 * 32,
        ),
        (
            "f32[8,16] dot(%c, %d), lhs_contracting_dims={1}, rhs_contracting_dims={1}",
            2 * 8 * 16 * 32,
        ),
    ],
)
def test_matmuls(operation, flops):
    text = (
        "ENTRY %main (a: f32[4,8,32]) -> f32[] {\n"
        "  %a = f32[4,8,32] parameter(0)\n  %b = f32[4,16,32] parameter(1)\n"
        "  %c = f32[8,32] parameter(2)\n  %d = f32[16,32] parameter(3)\n"
        f"  ROOT %r = {operation}\n}}\n"
    )
    assert traffic(parse(text)).flops == flops


def test_estimate_is_the_longer_of_memory_and_matmuls_and_the_collectives():
    found, chip = traffic(parse(SCAN)), CHIPS["v6e"]
    time = estimate(found, chip, 4)
    assert time.memory == found.bytes / 1.64e12
    assert time.collectives == pytest.approx(10 * 2 * (8192 * 0.75 / 200e9 + 2e-6))
    assert time.step == max(time.memory, time.compute) + time.collectives


def test_floor_of_experts_and_the_rounds_over_them():
    arch = released("gemma-4-26b-a4b")
    params = abstract_params(arch, jnp.bfloat16, "int8")
    one, all_ = (weight_bytes(params, arch, rows) for rows in (1, 10**4))
    assert one / 1e9 == pytest.approx(4.58, rel=0.01)
    assert all_ / 1e9 == pytest.approx(26.2, rel=0.01)
    assert rounds(arch, 1) == 2 and rounds(arch, 10**4) == 32  # four of 8, of 128 experts each


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gemma-9"], "unknown architecture"),
        (["gemma-4-31b", "--topology", "v9:1"], "--topology v9:1"),
        (["gemma-4-31b", "--batches", "0"], "--batches must be 1 or more"),
        (["gemma-4-31b", "--contexts", "99999999"], "--max-len must be"),
        (["gemma-4-31b", "--k", "32"], "K must be 0 to 31"),
        (["gemma-4-31b", "--out", "/"], "--out: / is a folder"),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["compile-report", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
