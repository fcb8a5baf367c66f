"""Freed memory goes back to the system once the process has grown, and not again without need."""

from __future__ import annotations

import asyncio

import pytest

from serve import spare_memory
from serve.spare_memory import GROWN, SpareMemory, of_this_process, resident


class Process:
    """Its size, and how often memory was given back, each time down to `least`."""

    def __init__(self, size: int) -> None:
        self.size = self.least = size
        self.times = 0

    def give_back(self) -> None:
        self.size, self.times = self.least, self.times + 1


@pytest.fixture
def process():
    return Process(10 * GROWN)


def check(memory: SpareMemory) -> None:
    asyncio.run(memory.check())


def test_growth_is_given_back_once(process):
    memory = SpareMemory(lambda: process.size, process.give_back)
    process.size += GROWN - 1
    check(memory)
    assert process.times == 0
    process.size += 1
    check(memory)
    assert (process.times, process.size) == (1, process.least)
    check(memory)
    assert process.times == 1


def test_what_stays_in_use_is_not_given_back_again_and_again(process):
    memory = SpareMemory(lambda: process.size, process.give_back)
    process.size = process.least = 12 * GROWN
    for _ in range(3):
        check(memory)
    assert process.times == 1


def test_growth_counts_from_the_least_size(process):
    memory = SpareMemory(lambda: process.size, process.give_back)
    process.size = process.least = 8 * GROWN
    check(memory)
    process.size = 9 * GROWN
    check(memory)
    assert process.times == 1


def test_this_process_gives_memory_back():
    memory = of_this_process()
    if memory is None:
        pytest.skip("needs glibc")
    assert resident() > GROWN // 4
    check(memory)


def test_without_glibc_nothing_is_watched(monkeypatch, tmp_path):
    monkeypatch.setattr(spare_memory, "STATM", tmp_path / "none")
    assert of_this_process() is None


def test_a_server_watches_until_it_ends(monkeypatch, process):
    monkeypatch.setattr(spare_memory, "SECONDS", 0.001)

    async def watched():
        task = asyncio.create_task(SpareMemory(lambda: process.size, process.give_back).watch())
        process.size += GROWN
        while not process.times:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(watched(), 10))
