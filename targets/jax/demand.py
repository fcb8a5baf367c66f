"""What a fusion reads of its operands: for a slice of a stack that is the slice, not the stack."""

from __future__ import annotations

from collections import defaultdict

from targets.jax.hlo import Computation, Instruction, Module

SLICES = ("dynamic-slice", "slice", "gather")
IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}
"""Updates of their first operand, and which operand holds what is written."""


def demands(module: Module, inner: Computation) -> list[float]:
    """Shares of each parameter of a fusion that its result needs, from the root backwards."""
    known = {i.name: i for i in inner.instructions}
    updates = {i.name for i in results(inner, known)}
    need: defaultdict[str, float] = defaultdict(float, {inner.root.name: 1.0})
    for i in reversed(inner.instructions):
        share = min(need[i.name], 1.0)
        operands = [known[n] for n in i.operands]
        if not share or not operands:
            continue
        if "calls" in i.calls:
            called = module.computations[i.calls["calls"]]
            asked = [share * part for part in demands(module, called)]
        else:
            asked = asks(i, operands, share, in_place=i.name in updates)
        for operand, part in zip(operands, asked, strict=True):
            need[operand.name] += part
    return [min(need[p.name], 1.0) for p in inner.parameters]


def asks(i: Instruction, operands: list[Instruction], share: float, in_place: bool) -> list[float]:
    """The share of each operand that `share` of the result needs."""
    if i.op in SLICES:
        part = share * i.shapes[0].elements / max(1, operands[0].shapes[0].elements)
        return [min(part, 1.0), *(1.0 for _ in operands[1:])]
    if i.op in IN_PLACE:
        return [0.0 if in_place else share, *(1.0 for _ in operands[1:])]
    if i.op in ("convolution", "dot"):
        return [1.0 for _ in operands]
    return [share for _ in operands]


def through(i: Instruction, known: dict[str, Instruction]) -> Instruction:
    while i.op in ("bitcast", "copy", "reshape", "transpose"):
        i = known[i.operands[0]]
    return i


def results(inner: Computation, known: dict[str, Instruction]) -> list[Instruction]:
    """A fusion's root, or the members of its tuple, without the copies and reshapes around them."""
    root = inner.root
    members = [known[n] for n in root.operands] if root.op == "tuple" else [root]
    return [through(i, known) for i in members]
