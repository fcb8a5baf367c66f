"""Optimised HLO, as XLA prints it (`jax.stages.Compiled.as_text`), read into plain values.

Only what counting needs: computations, instructions, shapes with their tiles and memory spaces.
Syntax: openxla.org/xla/operation_semantics and /xla/tiled_layout; checked by
tests/targets/jax/test_compile_report.py.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

HBM = 0
"""Memory space of a layout that names none; 1 is VMEM on a TPU, higher numbers are registers and
scalar memory."""
BITS = {"pred": 8, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "token": 0}
_ARRAY = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([\d,]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")
_INSTRUCTION = re.compile(r"\s*(ROOT )?%([\w.\-]+) = (.*)")
_CALLED = re.compile(r"(calls|to_apply|body|condition)=%([\w.\-]+)")


@dataclass(frozen=True)
class ArrayShape:
    """One array: dims in logical order, and the bytes that it takes up, tile padding included."""

    dtype: str
    dims: tuple[int, ...]
    bytes: int
    space: int = HBM

    @property
    def elements(self) -> int:
        return math.prod(self.dims)


@dataclass
class Instruction:
    """shapes: the results (one, or the members of a tuple, nested ones flattened)."""

    name: str
    op: str
    shapes: list[ArrayShape]
    operands: list[str]
    text: str
    """Everything after the operands: attributes and metadata."""
    root: bool = False
    arguments: str = ""
    """What stands between the parentheses, for parameters and constants."""

    @property
    def calls(self) -> dict[str, str]:
        """Called computations by the attribute that names them: calls, body, condition, ..."""
        return dict(_CALLED.findall(self.text))

    def attribute(self, pattern: str) -> str | None:
        """First group of a regular expression in the attributes, None if it is not there."""
        found = re.search(pattern, self.text)
        return found.group(1) if found else None

    @property
    def op_name(self) -> str:
        """The JAX path of the operation, or an argument's name."""
        return (self.attribute(r'op_name="((?:[^"\\]|\\.)*)"') or "").replace("\\'", "'")


@dataclass
class Computation:
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    @property
    def root(self) -> Instruction:
        return next(i for i in reversed(self.instructions) if i.root)

    @property
    def parameters(self) -> list[Instruction]:
        """In the order of their numbers."""
        found = [i for i in self.instructions if i.op == "parameter"]
        return sorted(found, key=lambda i: int(i.arguments))


@dataclass
class Module:
    computations: dict[str, Computation]
    entry: Computation


def parse(text: str) -> Module:
    """A module from its text. Instructions stay in the order of the text, operands first."""
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in text.splitlines():
        if line and not line[0].isspace() and line.endswith("{") and " -> " in line:
            head = line.removeprefix("ENTRY ")
            current = Computation(head.split(" ", 1)[0].removeprefix("%"))
            computations[current.name] = current
            entry = current if line.startswith("ENTRY") else entry
        elif current is not None and (found := _INSTRUCTION.match(line)):
            current.instructions.append(_instruction(*found.groups()))
    assert entry is not None, "no ENTRY computation in the HLO text"
    return Module(computations, entry)


def _instruction(root: str | None, name: str, rest: str) -> Instruction:
    result, rest = _balanced(rest) if rest.startswith("(") else rest.split(" ", 1)
    op, rest = rest.strip().split("(", 1)
    inside, text = _balanced("(" + rest)
    operands = re.findall(r"%([\w.\-]+)", inside)
    return Instruction(name, op, shapes(result), operands, text, bool(root), inside[1:-1])


def _balanced(text: str) -> tuple[str, str]:
    """Cut behind the parenthesis that closes the first one."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[: i + 1], text[i + 1 :]
    raise AssertionError(f"unbalanced parentheses in {text[:200]}")


def shapes(text: str) -> list[ArrayShape]:
    """Every array of a result type, `bf16[8,128]{1,0:T(8,128)(2,1)S(1)}` or a tuple of such."""
    return [_shape(*found) for found in _ARRAY.findall(re.sub(r"/\*.*?\*/", "", text))]


def _shape(dtype: str, dims: str, order: str, layout: str) -> ArrayShape:
    sizes = tuple(int(d) for d in dims.split(",") if d)
    space = re.search(r"S\((\d+)\)", layout)
    return ArrayShape(
        dtype, sizes, _bytes(dtype, sizes, order, layout), int(space.group(1)) if space else HBM
    )


def _bytes(dtype: str, sizes: tuple[int, ...], order: str, layout: str) -> int:
    """With the minor-most dimensions rounded up to the first tile; tiles within it add nothing."""
    minor_first = [sizes[int(d)] for d in order.split(",") if d] if order else list(sizes[::-1])
    tile = re.search(r"T\(([\d,]+)\)", layout)
    for i, edge in enumerate(reversed(tile.group(1).split(",")) if tile else ()):
        if i < len(minor_first):
            minor_first[i] = -(-minor_first[i] // int(edge)) * int(edge)
    width = re.search(r"\d+", dtype)
    bits = BITS.get(dtype) or (int(width.group()) if width else 0)
    return math.prod(minor_first) * bits // 8
