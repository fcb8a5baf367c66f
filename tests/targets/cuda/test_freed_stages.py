"""Without a GPU: no kernel frees a stage of its ring (ring.cuh) before its loads have arrived.

In machine code a load from shared memory names a counter, and whatever needs its result waits for
that counter. An arrival at a barrier waits for none by itself: the copy that it lets the producer
issue may then be faster than the load.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest

from targets.cuda import launch
from targets.cuda.launch import Variant, compile_variant
from tests.machine_code import key, sections
from tests.targets.cuda.kernel_variants import changed, covering, needed

RINGS = "gemm", "attention_fused"
"""Files of kernels that load from a ring into registers. wide.cu and w8a8.cu wait for the tensor
cores, which have then read it."""
OPCODE = 0xFFF
"""An instruction's lowest bits."""
LOAD = 0x984
"""LDS, as `nvdisasm -hex` shows it."""
ARRIVE = 0x9A7
"""SYNCS.ARRIVE."""
FENCE = 0x3C6
"""FENCE.VIEW.ASYNC, behind its MEMBAR."""
BRANCH = 0x947
"""BRA."""
EXIT = 0x94D
"""EXIT."""
ALWAYS = 7
"""The predicate of an instruction that runs in any case."""
NO_COUNTER = 7
"""Of a load: that of the next load serves, as they arrive in order."""


class Instruction(NamedTuple):
    opcode: int
    always: bool
    sets: int
    """The counter that goes up until its result is there."""
    waits: int
    """A bit for each counter that must be down first."""


def instructions(binary: bytes) -> Iterator[Instruction]:
    """Of all kernels of a cubin for sm_90, in order."""
    for name, content in sections(binary):
        if not name.startswith(".text."):
            continue
        for low, high in struct.iter_unpack("<QQ", content):
            control = high >> 41
            always = (low >> 12) & 15 == ALWAYS
            yield Instruction(low & OPCODE, always, control >> 5 & 7, control >> 11 & 63)


def arrivals_before_loads(binary: bytes) -> tuple[int, int]:
    """How many arrivals pass loads that lie before them, of how many."""
    pending: set[int] = set()
    early = count = 0
    for one in instructions(binary):
        pending = {counter for counter in pending if not one.waits >> counter & 1}
        if one.opcode == LOAD and one.sets != NO_COUNTER:
            pending.add(one.sets)
        elif one.opcode == FENCE or (one.opcode in (BRANCH, EXIT) and one.always):
            pending.clear()
        elif one.opcode == ARRIVE:
            count, early = count + 1, early + bool(pending)
    return early, count


@cache
def compiled(variant: Variant) -> bytes:
    return compile_variant(variant)


def check(made: list[Variant]) -> None:
    found = {key(variant): arrivals_before_loads(compiled(variant)) for variant in made}
    assert {name for name, (early, count) in found.items() if early or not count} == set()


@pytest.mark.parametrize("file", RINGS)
def test_a_stage_is_freed_when_its_loads_have_arrived(file):
    check(covering(needed(file)))


@pytest.mark.slow
@pytest.mark.parametrize("file", RINGS)
def test_every_variant_frees_its_stages_so(file):
    check(needed(file))


def test_an_arrival_that_waits_for_no_load_is_found(tmp_path, monkeypatch):
    variant, waits = covering(needed("gemm"))[0], "arrive(empty + (loaded & zero))"
    without = changed(variant, "ring.cuh", waits, "arrive(empty)", tmp_path)
    monkeypatch.setattr(launch, "SOURCES", tmp_path)
    early, count = arrivals_before_loads(compile_variant(without))
    assert 0 < early < count
