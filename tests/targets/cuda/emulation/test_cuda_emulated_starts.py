"""Emulated kernels that start early see nothing that an earlier one may still be writing, and write
nothing that it may still read."""

from __future__ import annotations

import pytest
import torch

from targets.cuda.launch import Variant, pointer
from tests.targets.cuda.emulation.emulated import Launcher

TURNS = 12
"""Half of all clusters run as if earlier kernels had ended."""
HEAD = """#include "common.cuh"
extern "C" __global__ void"""
ADD_ONE = f"""{HEAD} add_one(int* to, const int* from) {{
  let_next_start();
  wait_for_previous();
  if (from) to[blockIdx.x] = from[blockIdx.x] + 1; else to[blockIdx.x] = 7;
}}"""
LATE = f"""{HEAD} late(int* to, const int* from) {{
  wait_for_previous();
  let_next_start();
  to[blockIdx.x] = 3;
}}"""
READ_FIRST = f"""{HEAD} read_first(int* to, const int* from) {{
  const int value = from[blockIdx.x];
  wait_for_previous();
  to[blockIdx.x] = value;
}}"""
WRITE_FIRST = f"""{HEAD} write_first(int* to, const int* from) {{
  to[blockIdx.x] = 5;
  wait_for_previous();
}}"""
NEVER_WAIT = f"""{HEAD} never_wait(int* to, const int* from) {{ let_next_start(); }}"""
ASK_FIRST = f"""{HEAD} ask_first(int* to, const int* from) {{
  __shared__ int room[4];
  copy16(shared_address(room), from);
  wait_for_previous();
  copies_done();
  to[blockIdx.x] = room[blockIdx.x % 4];
}}"""


@pytest.fixture
def start(tmp_path):
    """start(source, to, from) launches the one kernel of a source, early or not."""
    launch = Launcher()

    def one(source: str, to: torch.Tensor, from_: torch.Tensor | None = None, pdl: bool = True):
        name = source.split("void ")[1].split("(")[0]
        (tmp_path / f"{name}.cu").write_text(source)
        variant = Variant(name, folder=tmp_path)
        launch(variant, name, (TURNS, 1, 1), 1, [pointer(to), pointer(from_)], pdl=pdl)
        return to

    return one


def room() -> torch.Tensor:
    return torch.empty(TURNS, dtype=torch.int32)


def test_who_waits_reads_what_was_written(start):
    first, second, third = room(), room(), room()
    start(ADD_ONE, first)
    start(ADD_ONE, second, first)
    assert (start(ADD_ONE, third, second) == 9).all()


@pytest.mark.parametrize("reader", [READ_FIRST, ASK_FIRST], ids=["read", "copied"])
def test_what_is_read_too_soon_is_not_there(start, reader):
    first = room()
    start(ADD_ONE, first)
    assert not (start(reader, room(), first) == 7).all()


def test_all_that_may_run_still_is_hidden(start):
    first = room()
    start(ADD_ONE, first)
    start(ADD_ONE, room(), first)
    assert not (start(READ_FIRST, room(), first) == 7).all()


def test_after_a_late_kernel_only_its_own_is_hidden(start):
    first, late = room(), room()
    start(ADD_ONE, first)
    start(LATE, late, first)
    assert (start(READ_FIRST, room(), first) == 7).all()
    last = room()
    start(LATE, last, first)
    assert not (start(READ_FIRST, room(), last) == 3).all()


def test_a_kernel_has_to_wait_or_others_could_not_for_those_before_it(start):
    first = room()
    start(ADD_ONE, first)
    with pytest.raises(AssertionError, match="nobody waits"):
        start(NEVER_WAIT, room())


def test_who_does_not_start_early_sees_all(start):
    first = room()
    start(ADD_ONE, first)
    assert (start(READ_FIRST, room(), first, pdl=False) == 7).all()


def test_nothing_shared_is_written_before_the_wait(start):
    first = room()
    start(ADD_ONE, first)
    start(ADD_ONE, room(), first)
    with pytest.raises(AssertionError, match="written before"):
        for _ in range(TURNS):
            start(WRITE_FIRST, first)
            start(ADD_ONE, room(), first)
