"""What one run of a compiled program moves: bytes from and to HBM, operations, collectives.

XLA's own `cost_analysis` counts a loop's body once, and a slice of a stacked weight as the whole
stack or not at all, by kind of fusion. So this walks the optimised HLO: loops times their trips,
fusions by what they read of each operand, in-place updates by what they write. The counts can be
checked: every weight must be read exactly once.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from targets.jax.demand import IN_PLACE, asks, demands, results, through
from targets.jax.flops import flops
from targets.jax.hlo import HBM, ArrayShape, Computation, Instruction, Module

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
}
"""Operations that move nothing."""
MEANT = "temporaries"
"""The name under which bytes are counted that come from no argument."""


@dataclass(frozen=True)
class Collective:
    """One collective of the program text. bytes: of its result on one chip. runs: per step."""

    kind: str
    bytes: int
    runs: float
    op_name: str


@dataclass
class Traffic:
    """Totals of one chip and one run. reads: HBM bytes by argument name, or MEANT."""

    reads: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    written: float = 0
    flops: float = 0
    cycles: float = 0
    """The sum of the compiler's own estimates; it counts 2,100 for a small fusion."""
    collectives: list[Collective] = field(default_factory=list)

    @property
    def bytes(self) -> float:
        return sum(self.reads.values()) + self.written


Trips = Callable[[str], float]
"""The trip count of a loop for which it depends on data, by the loop's JAX path."""


def _endless(path: str) -> float:
    raise AssertionError(f"the trip count of {path!r} is not in the HLO")


def traffic(module: Module, trips: Trips = _endless) -> Traffic:
    """Walk the program from its entry."""
    walk = _Walk(module, trips)
    names = [p.op_name or p.name for p in module.entry.parameters]
    walk.run(module.entry, names, 1.0)
    return walk.found


class _Walk:
    def __init__(self, module: Module, trips: Trips) -> None:
        self.module, self.trips, self.found = module, trips, Traffic()

    def run(self, computation: Computation, arguments: list[Any], times: float) -> Any:
        """Count `times` runs; arguments and the result are origins: an argument's name, None for
        what the program made, or a list of such for a tuple."""
        origins: dict[str, Any] = {}
        known = {i.name: i for i in computation.instructions}
        for i in computation.instructions:
            inputs = [origins.get(name) for name in i.operands]
            if i.op == "parameter":
                origins[i.name] = arguments[int(i.arguments)]
            elif i.op == "tuple":
                origins[i.name] = inputs
            elif i.op == "get-tuple-element":
                index = int(i.attribute(r"index=(\d+)") or 0)
                origins[i.name] = inputs[0][index] if isinstance(inputs[0], list) else None
            elif i.op in ("bitcast", "opt-barrier"):
                origins[i.name] = inputs[0]
            elif i.op == "while":
                origins[i.name] = self._loop(i, inputs[0], times)
            elif i.op == "conditional":
                self._branches(i, inputs, times)
            elif i.op == "call":
                origins[i.name] = self.run(self._called(i, "to_apply"), inputs, times)
            else:
                origins[i.name] = self._count(i, [known[n] for n in i.operands], inputs, times)
        return origins.get(computation.root.name)

    def _loop(self, i: Instruction, carried: Any, times: float) -> Any:
        count = _known_trips(self._called(i, "condition"))
        if count is None:
            count = self.trips(i.op_name)
        self.run(self._called(i, "condition"), [carried], times * count)
        self.run(self._called(i, "body"), [carried], times * count)
        return carried

    def _branches(self, i: Instruction, origins: list[Any], times: float) -> None:
        """The branch that reads most, as if it were always taken."""
        inside = i.attribute(r"branch_computations=\{([^}]*)\}")
        names = re.findall(r"%([\w.\-]+)", inside) if inside else []
        names = names or re.findall(r"(?:true|false)_computation=%([\w.\-]+)", i.text)
        walks = []
        for name, arguments in zip(names, origins[1:], strict=True):
            walk = _Walk(self.module, self.trips)
            walk.run(self.module.computations[name], [arguments], times)
            walks.append(walk.found)
        most = max(walks, key=lambda found: found.bytes)
        for name, size in most.reads.items():
            self.found.reads[name] += size
        self.found.written += most.written
        self.found.flops += most.flops
        self.found.cycles += most.cycles
        self.found.collectives += most.collectives

    def _called(self, i: Instruction, kind: str) -> Computation:
        return self.module.computations[i.calls[kind]]

    def _count(
        self, i: Instruction, operands: list[Instruction], origins: list[Any], times: float
    ) -> Any:
        """Reads, writes and operations of one instruction; the origin of its result."""
        if i.op in FREE or i.op.endswith(("-done", "-update")):
            return None
        self.found.cycles += times * float(i.attribute(r'"estimated_cycles":"(\d+)"') or 0)
        self.found.flops += times * self._flops(i, operands)
        self._collect(i, times)
        for operand, origin, size in zip(operands, origins, self._read(i, operands), strict=True):
            if operand.op == "constant":
                continue
            if len(operand.shapes) == 1 and operand.shapes[0].space == HBM:
                name = origin if isinstance(origin, str) else MEANT
                self.found.reads[name] += times * size
        writes, updated = self._written(i, operands)
        self.found.written += times * writes
        return origins[updated] if updated is not None else None

    def _flops(self, i: Instruction, operands: list[Instruction]) -> float:
        if "calls" not in i.calls:
            return flops(i, operands)
        inner = self._called(i, "calls")
        known = {j.name: j for j in inner.instructions}
        return sum(self._flops(j, [known[n] for n in j.operands]) for j in inner.instructions)

    def _collect(self, i: Instruction, times: float) -> None:
        kind = i.op.removesuffix("-start")
        if kind in COLLECTIVES:
            results = i.shapes[-1:] if i.op.endswith("-start") else i.shapes
            size = sum(s.bytes for s in results)
            self.found.collectives.append(Collective(kind, size, times, i.op_name))
        elif "calls" in i.calls:
            for j in self._called(i, "calls").instructions:
                self._collect(j, times)

    def _read(self, i: Instruction, operands: list[Instruction]) -> list[float]:
        """Bytes that the instruction reads of each operand."""
        if i.op == "copy-start":
            return [i.shapes[0].bytes]
        if i.op == "slice-start":
            return [i.shapes[-2].bytes]
        if "calls" in i.calls:
            shares = demands(self.module, self._called(i, "calls"))
        else:
            shares = asks(i, operands, 1.0, in_place=True)
        return [
            share * sum(s.bytes for s in o.shapes)
            for share, o in zip(shares, operands, strict=True)
        ]

    def _written(self, i: Instruction, operands: list[Instruction]) -> tuple[float, int | None]:
        """Bytes written to HBM, and which operand was updated in place, if one was."""
        if i.op == "copy-start":
            return _in_hbm(i.shapes[0]), None
        if i.op.endswith("-start"):
            return _in_hbm(i.shapes[-2] if i.op == "slice-start" else i.shapes[-1]), None
        if "calls" not in i.calls:
            if i.op in IN_PLACE:
                return _in_hbm(i.shapes[0]) and operands[IN_PLACE[i.op]].shapes[0].bytes, 0
            return sum(map(_in_hbm, i.shapes)), None
        inner = self._called(i, "calls")
        known = {j.name: j for j in inner.instructions}
        total, updated = 0.0, None
        for result, shape in zip(results(inner, known), i.shapes, strict=False):
            if result.op not in IN_PLACE:
                total += _in_hbm(shape)
                continue
            total += _in_hbm(shape) and known[result.operands[IN_PLACE[result.op]]].shapes[0].bytes
            base = through(known[result.operands[0]], known)
            if base.op == "parameter":
                updated = int(base.arguments)
        return total, updated


def _in_hbm(shape: ArrayShape) -> int:
    return shape.bytes if shape.space == HBM else 0


def _known_trips(condition: Computation) -> float | None:
    """The bound that the counter of a scan is compared with, None if it isn't a constant."""
    constants = {i.name: i.arguments for i in condition.instructions if i.op == "constant"}
    root = condition.root
    if root.op != "compare" or "direction=LT" not in root.text:
        return None
    bound = constants.get(root.operands[1])
    return None if bound is None else float(bound)
