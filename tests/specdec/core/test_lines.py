"""What keeps several processes one: their lines, and engines in step."""

from __future__ import annotations

import os
import queue
import socket
import threading
from itertools import cycle as around

import pytest

from drafters.ngram.host import NgramDrafter
from serve.lockstep import Leader, Orders, follow
from specdec.cli.hosts import check_same
from specdec.core.control_channel import ControlChannel, Meeting, call, invite
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.errors import UserError
from specdec.core.types import Sampling, Sequence
from tests.support.fakes import FakeTarget

WAIT = 20


@pytest.fixture
def ends():
    """Process 0's channel, the two others' channels, and a queue of reported losses per process."""
    losses = {process: queue.SimpleQueue() for process in range(3)}
    told: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    made: queue.SimpleQueue[ControlChannel] = queue.SimpleQueue()

    def share(packed):
        return [told.put(packed) for _ in range(2)]

    def join(process: int) -> None:
        made.put(call(process, Meeting.unpacked(told.get()), losses[process].put))

    others = [threading.Thread(target=join, args=(p,)) for p in (1, 2)]
    for thread in others:
        thread.start()
    first = invite("localhost", 2, share, losses[0].put)
    rest = sorted((made.get(timeout=WAIT) for _ in others), key=lambda lines: lines.process)
    return first, rest, losses


def _no_constraint(packed):
    raise AssertionError("none of these has one")


def test_messages_arrive_in_order_at_all_others(ends):
    first, rest, _ = ends
    assert first.leads and not any(lines.leads for lines in rest)
    for message in (b"one", b"", b"x" * 1_000_000):
        first.send(message)
        assert [lines.receive() for lines in rest] == [message] * 2


def test_who_fails_says_why_and_who_parts_in_peace_is_not_missed(ends):
    first, rest, losses = ends
    rest[0].close()
    rest[1].fail("no such folder")
    assert losses[0].get(timeout=WAIT) == "process 2 has failed: no such folder"
    first.fail("interrupted")
    assert losses[2].get(timeout=WAIT) == "process 0 has failed: interrupted"
    assert losses[0].empty()


def test_who_dies_is_missed(ends):
    first, rest, losses = ends
    (line,) = rest[0]._peers.values()
    with socket.socket(fileno=os.dup(line.fileno())) as wire:
        wire.shutdown(socket.SHUT_RDWR)  # as the system does when a process ends
    assert losses[0].get(timeout=WAIT).startswith("process 1 is gone")
    first.send(b"and the rest go on")
    assert rest[1].receive() == b"and the rest go on"


def test_processes_that_were_started_otherwise_are_refused(ends):
    first, (same, other), _ = ends
    check_same(first, {"k": 4, "cache": "/here"})
    check_same(same, {"k": 4, "cache": "/there"})
    with pytest.raises(UserError, match="k is 5 in process 2 and 4 in process 0"):
        check_same(other, {"k": 5, "cache": "/here"})


def test_followers_do_the_leaders_steps():
    """With sampling of all kinds, one sequence cancelled while it runs and one after its end."""
    engines = [_engine() for _ in range(2)]
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    leader, first = Leader(messages.put), engines[0]
    seqs = [
        Sequence([3 + i, 4], sampling, max_tokens=9, stop_ids=frozenset({7, 48}))
        for i, sampling in zip(range(5), around(SAMPLINGS), strict=False)
    ]
    joining, gone = {0: seqs[:2], 2: seqs[2:]}, {3: [seqs[2]], 9: [seqs[0]]}
    theirs: list[Sequence] = []
    submit = engines[1].submit
    engines[1].submit = lambda seq: (theirs.append(seq), submit(seq))[1]
    for turn in range(30):
        for seq in joining.get(turn, ()):
            first.submit(seq)
        for seq in gone.get(turn, ()):
            seq.cancelled = True
        leader.announce(Orders(joining.get(turn, []), gone.get(turn, [])))
        first.step()
    leader.end()
    follow(engines[1], messages.get, _no_constraint)
    assert first.idle and engines[1].idle and messages.empty()
    assert [s.tokens for s in theirs] == [s.tokens for s in seqs]
    assert [s.finish for s in theirs] == [s.finish for s in seqs]
    assert [s.sampling for s in theirs] == [s.sampling for s in seqs]
    assert "cancelled" in {s.finish for s in seqs}
    assert (engines[1].target.fed == first.target.fed).all()


SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.7, top_p=0.9, seed=2**64 - 1, logprobs=3),
    Sampling(logit_bias=((5, -1.5), (9, 0.1)), repetition_penalty=1.1),
)


def _engine() -> Engine:
    target, drafter = FakeTarget(), NgramDrafter(1, 3)
    return Engine(target, drafter, host_cycle(target, drafter, 3))
