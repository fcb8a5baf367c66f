"""Floating-point operations of one HLO matmul.

A TPU's matmuls are convolutions by then, batch dimensions among them as spatial ones: a kernel
tap that falls on padding or between dilated inputs multiplies nothing and is not counted.
"""

from __future__ import annotations

import math

from targets.jax.hlo import Instruction


def flops(i: Instruction, operands: list[Instruction]) -> float:
    """2 per multiply and add; 0 for what is no matmul."""
    if i.op == "dot":
        contracted = i.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
        left = operands[0].shapes[0].dims
        return 2.0 * i.shapes[0].elements * math.prod(left[int(d)] for d in contracted.split(","))
    if i.op == "convolution":
        return _convolution(i, operands[0].shapes[0].dims, operands[1].shapes[0].dims)
    return 0.0


def _convolution(i: Instruction, left: tuple[int, ...], right: tuple[int, ...]) -> float:
    labels = i.attribute(r"dim_labels=(\S+?)[,\s]") or i.attribute(r"dim_labels=(\S+)") or ""
    inputs, rest = labels.split("_")
    kernel, output = rest.split("->")
    out = dict(zip(output, i.shapes[0].dims, strict=True))
    in_ = dict(zip(inputs, left, strict=True))
    taps = dict(zip(kernel, right, strict=True))
    total = 2.0 * out["b"] * out["f"] * taps["i"]
    for number, window in enumerate(_windows(i, sum(c.isdigit() for c in output))):
        spatial = str(number)
        total *= _valid(in_[spatial], taps[spatial], out[spatial], window)
    return total


def _windows(i: Instruction, spatial: int) -> list[dict[str, int]]:
    """Stride, padding before, dilations of each spatial dimension."""
    text = i.attribute(r"window=\{([^}]*)\}") or ""
    fields = dict(part.split("=") for part in text.split())
    found = []
    for n in range(spatial):
        one = {"stride": 1, "pad": 0, "lhs_dilate": 1, "rhs_dilate": 1}
        for key in one:
            if key in fields:
                one[key] = int(fields[key].split("x")[n].split("_")[0])
        found.append(one)
    return found


def _valid(size: int, taps: int, out: int, window: dict[str, int]) -> int:
    """Pairs of an output place and a tap that meet a real input."""
    spread, last = window["lhs_dilate"], (size - 1) * window["lhs_dilate"]
    count = 0
    for place in range(out):
        for tap in range(taps):
            at = place * window["stride"] + tap * window["rhs_dilate"] - window["pad"]
            count += 0 <= at <= last and at % spread == 0
    return count
