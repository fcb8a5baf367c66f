"""Updates on their way from the engine to a client that is slower."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

from drafters.none.host import NoDrafter
from serve.cycle_reports import Speculating
from serve.generation import AT_ONCE, Context, _goes_on, begin
from serve.metrics import Metrics
from serve.runner import EngineRunner, Mailbox, Update, joined
from serve.schema import CompletionRequest, parse
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.pages import PagePlan, Pages
from specdec.core.pictures import Picture, PlacedPicture, place_ids
from specdec.core.types import Sequence, TokenLogprob
from tests.support.fakes import FakeTarget
from tests.support.serving import TOKENIZER, ServedTarget

FIRST = Update(0, (1, 2), drafted=4, cycles=1, emitted=2)
SECOND = Update(0, (3,), drafted=8, cycles=2, emitted=3)


def test_what_has_come_is_taken_at_once_and_in_order():
    async def taken():
        box = Mailbox()
        reading = asyncio.create_task(box.take())
        await asyncio.sleep(0)
        for item in (FIRST, None, SECOND):
            box.put(item)
        return await reading, box

    items, box = asyncio.run(taken())
    assert items == [FIRST, None, SECOND]

    async def nothing():
        await asyncio.wait_for(box.take(), 0.01)

    with pytest.raises(TimeoutError):
        asyncio.run(nothing())
    box.put(SECOND)
    assert asyncio.run(box.take()) == [SECOND]


def test_a_reader_that_leaves_early_leaves_no_task_to_the_event_loop():
    async def left():
        box = Mailbox()
        for item in (FIRST, None, SECOND):
            box.put(item)
        async for update in box:
            assert update == FIRST
            break
        await asyncio.sleep(0)
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(left()) == set()


def test_updates_of_a_choice_become_one_with_the_later_ones_counts():
    told = [TokenLogprob(0.5, (), 0, b"") for _ in range(3)]
    first, second = replace(FIRST, logprobs=tuple(told[:2])), replace(SECOND, logprobs=(told[2],))
    one = joined([first, replace(second, finish="stop")])
    assert (one.tokens, one.logprobs, one.joined) == ((1, 2, 3), tuple(told), 2)
    assert (one.drafted, one.cycles, one.emitted, one.finish) == (8, 2, 3, "stop")


@pytest.mark.parametrize(
    ("run", "after"),
    [
        ([FIRST], replace(SECOND, index=1)),
        ([replace(FIRST, finish="length")], SECOND),
        ([FIRST], replace(SECOND, error="broken", finish="error")),
        ([FIRST] * AT_ONCE, SECOND),
    ],
)
def test_what_stays_apart(run, after):
    assert not _goes_on(run, after) and _goes_on([FIRST], SECOND)


def test_a_client_that_reads_late_leaves_the_event_loop_to_others():
    """It paused; what has come meanwhile is sent in parts, between which others go on."""

    async def run() -> tuple[int, int, int]:
        turns, target = 0, ServedTarget(slots=1, max_len=1200)
        runner = EngineRunner(Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 0)))
        runner.start()
        plain = Speculating(None, 0)
        context = Context(runner, TOKENIZER, Metrics(runner, "fake", plain), "fake", plain)
        body = {"prompt": "ab", "max_tokens": 1000, "ignore_eos": True, "stop": ["never comes"]}
        request = parse(CompletionRequest, json.dumps(body).encode())
        generation = await begin(context, request, "late")
        (seq,) = generation.plan.choices
        while seq.finish is None:
            await asyncio.sleep(0.01)

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(others())
        pieces = [piece async for piece in generation.pieces()]
        beside.cancel()
        await asyncio.to_thread(runner.close)
        return generation.usage.completion_tokens, len(pieces), turns

    tokens, pieces, turns = asyncio.run(run())
    assert tokens == 1000 and pieces < 1000 // 8
    assert turns >= 1000 // AT_ONCE


def seeing(max_tokens):
    """A request with a picture."""
    picture = Picture(np.zeros((9, 3), np.uint8), np.zeros((9, 2), np.int32), 3, b"name")
    placed = (PlacedPicture(1, picture),)
    return Sequence([2, *place_ids(1, 3), 4], max_tokens=max_tokens, pictures=placed)


@pytest.mark.parametrize("pages", [None, Pages(PagePlan(4096, 8, 2, 8000, 4), 2)])
def test_a_picture_is_held_as_long_as_its_prompt_may_be_read(pages):
    """With pages a text may give way, and is read again."""
    seq, target = seeing(5000), FakeTarget(slots=2, max_len=8000)
    drafter = NoDrafter()
    engine = Engine(target, drafter, host_cycle(target, drafter, 0), pages=pages)

    async def run():
        runner = EngineRunner(engine)
        runner.start()
        await anext(runner.submit([seq]).updates)
        held = seq.pictures
        await asyncio.to_thread(runner.close)
        return held

    assert bool(asyncio.run(run())) == (pages is not None)


def test_an_ended_sequence_holds_no_picture():
    """Drafters and loops keep a slot's last sequence; idle servers had no room for pictures."""
    ended, left = seeing(2), seeing(5000)

    async def run():
        target = FakeTarget(slots=2, max_len=8000)
        runner = EngineRunner(Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 0)))
        runner.start()
        box = runner.submit([ended, left]).updates
        finished = 0
        async for update in box:
            finished += update.finish is not None
            runner.cancel([left])
            if finished == 2:
                break
        await asyncio.to_thread(runner.close)

    asyncio.run(run())
    assert (ended.finish, left.finish) == ("length", "cancelled")
    assert ended.pictures == left.pictures == ()
