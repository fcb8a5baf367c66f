"""A digest of each kernel variant's machine code, beside those in `data/machine_code.json`.

`python -m tests.machine_code` compiles all variants (4 minutes on one core) and writes the table;
`python -m tests.machine_code gemm moe` those of these files alone. For a change that is meant to
change machine code, on a card as well: a change that is not needs no new table.

The table also has a digest of what each file's kernels were compiled from. Where that is the same,
so is the machine code, and the fast suite compiles one variant of the file in place of many.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import struct
import sys
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from targets.cuda import launch
from targets.cuda.launch import Variant, compile_variant
from tests.support.places import DATA
from tests.targets.cuda.kernel_variants import FILES, needed

TABLE = DATA / "machine_code.json"
CODE = ".text.", ".nv.info", ".nv.constant0.", ".nv.constant2", ".nv.constant3", ".nv.shared."
"""Instructions; registers, stack and parameters; what instructions read at fixed places; how much
shared memory."""
VALUES = ".nv.constant4", ".nv.global"
"""Constants of the source, and a table of their addresses. Unused ones too, so a new name for a
number changes these and not an instruction."""
NO_BITS = 8
"""The type of a section of which the file has the size only."""
SIZED = 4
"""The format of an entry of .nv.info that has a size and as many bytes; others are a word."""
OF_A_SYMBOL = {0x0A, 0x0F, 0x11, 0x12, 0x23, 0x2F}
"""Entries of .nv.info that begin with a symbol's number, which moves with what else has a name:
where parameters lie, externs, sizes of frames and stacks, registers."""
LETTERS = 16
"""Of a digest that are kept."""


class Section(NamedTuple):
    name: str
    content: bytes


def sections(binary: bytes) -> Iterator[Section]:
    """Of a little-endian ELF64 file. One without bits has its size for a content."""
    (table,) = struct.unpack_from("<Q", binary, 0x28)
    each, count, of_names = struct.unpack_from("<HHH", binary, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", binary, table + i * each) for i in range(count)]
    names = headers[of_names][4]
    for name, kind, _, _, place, size in headers:
        begin = names + name
        called = binary[begin : binary.index(b"\0", begin)].decode()
        bits = struct.pack("<Q", size) if kind == NO_BITS else binary[place : place + size]
        yield Section(called, bits)


def entries(info: bytes) -> list[bytes]:
    """Of a section .nv.info, in an order that has nothing to do with names, symbols left out."""
    found, at = [], 0
    while at < len(info):
        form, what, size = struct.unpack_from("<BBH", info, at)
        end = at + 4 + (size if form == SIZED else 0)
        first = at + 8 if form == SIZED and what in OF_A_SYMBOL else at + 4
        found.append(info[at : at + 4] + info[first:end])
        at = end
    return sorted(found)


def digest(binary: bytes) -> str:
    """Of the code, and of the constants: the same whatever kernels and symbols are called."""
    return " ".join(_of_kinds(binary, kinds) for kinds in (CODE, VALUES))


def _of_kinds(binary: bytes, kinds: tuple[str, ...]) -> str:
    found = []
    for section in sections(binary):
        for kind in kinds:
            if section.name.startswith(kind):
                info = section.name.startswith(".nv.info")
                content = b"".join(entries(section.content)) if info else section.content
                found.append((kind, hashlib.sha256(content).hexdigest()))
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest()[:LETTERS]


def key(variant: Variant) -> str:
    return " ".join([variant.file, *(f"{name}={value}" for name, value in variant.macros)])


def inputs(made: list[Variant]) -> str:
    """A digest of all that the compiler is given for the variants of a file, and of how."""
    of = hashlib.sha256(inspect.getsource(compile_variant).encode())
    for file in (made[0].source, *launch._headers()):
        of.update(f"{file.name} {file.stat().st_size} ".encode() + file.read_bytes())
    of.update(repr(sorted((key(variant), variant.options) for variant in made)).encode())
    return of.hexdigest()[:LETTERS]


def compiler() -> str:
    """NVRTC's version, to the build."""
    from importlib.metadata import version

    return version("nvidia-cuda-nvrtc")


@cache
def table() -> dict:
    """The version of NVRTC that made it, a digest for each key, and one of each file's inputs."""
    return json.loads(TABLE.read_text())


def write(files: list[str]) -> None:
    """Anew, or anew of these files alone."""
    kept = {} if files == sorted(FILES) else table()["digests"]
    digests = {name: value for name, value in kept.items() if name.split()[0] not in files}
    given = {} if files == sorted(FILES) else table()["inputs"]
    for file in files:
        given |= {file: inputs(needed(file))}
        digests |= {key(variant): digest(compile_variant(variant)) for variant in needed(file)}
        print(file, flush=True)
    whole = {"nvidia-cuda-nvrtc": compiler(), "inputs": dict(sorted(given.items()))}
    whole |= {"digests": dict(sorted(digests.items()))}
    TABLE.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    write(sorted(sys.argv[1:] or FILES))
