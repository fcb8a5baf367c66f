"""Pages: what a text holds, which text may join, and which gives way."""

from __future__ import annotations

from specdec.core.pages import PagePlan, Pages
from specdec.core.scheduler import Scheduler
from specdec.core.types import Owner, Sequence

PLAN = PagePlan(page=10, total=8, ahead=2, longest=50, reread=4)


def test_a_text_holds_pages_for_what_may_be_written():
    assert [PLAN.needed(n) for n in (1, 8, 9, 18, 19, 48, 1000)] == [1, 1, 2, 2, 3, 5, 5]
    assert PLAN.least(slots=1) == 5 and PLAN.least(slots=3) == 13
    assert PLAN.texts(8, 64) == 8 and PLAN.texts(8, 4) == 4 and PLAN.texts(30, 64) == 2


def test_pages_are_reserved_whole_or_not_at_all():
    pages = Pages(PLAN, 2)
    assert pages.reserve(0, 48) and pages.held == [5, 0]
    assert not pages.reserve(1, 40) and pages.held == [5, 0]
    assert pages.reserve(1, 20) and pages.free == 0
    assert pages.reserve(0, 3), "what is held already"
    pages.release(0)
    assert pages.held == [0, 3] and pages.free == 5


def test_beside_others_one_page_stays_free():
    pages = Pages(PLAN, 3)
    assert pages.has_room(48)
    pages.reserve(0, 28)
    assert pages.has_room(38) and not pages.has_room(39)


def test_a_new_schedulers_slots_are_empty():
    """A bench that fed slots by itself has left its pages held."""
    pages = Pages(PLAN, 2)
    pages.reserve(1, 48)
    Scheduler(2, max_waiting=1, chunk=8, pages=pages)
    assert pages.held == [0, 0]


def scheduler(slots: int = 3) -> Scheduler:
    return Scheduler(slots, max_waiting=9, chunk=8, pages=Pages(PLAN, slots))


def running(own: Scheduler, *lengths: int) -> list[Sequence]:
    seqs = [Sequence([1] * length) for length in lengths]
    for seq in seqs:
        own.submit(seq)
    for seq in own.admit():
        own.chunk_done(seq, seq.prompt_len)
        seq.tokens.append(2)
    return seqs


def test_the_last_to_join_gives_way_and_comes_back_first():
    own = scheduler()
    first, second, third = running(own, 18, 8, 8)
    assert own.pages is not None and sorted(own.pages.held) == [1, 1, 2]
    new = Sequence([1] * 3)
    own.submit(new)
    first.tokens += [3] * 26  # of 45: five pages, with one each of the others
    second.tokens += [3] * 10
    gone = own.grow()
    assert gone == [third] and third.slot == -1 and third.prefilled == 0
    assert list(own.waiting) == [third, new]
    assert own.admit() == [], "no page is free beside those that run"
    own.release(first)
    assert own.admit() == [third, new] and third.seatings == 2 and new.seatings == 1


def requests(*lengths: int) -> list[Sequence]:
    return [Sequence([1] * n, owner=Owner("", str(i))) for i, n in enumerate(lengths)]


def test_short_texts_pass_one_without_room_and_leave_it_what_it_waits_for():
    own = scheduler(slots=5)
    (old,) = running(own, 38)
    long, *short = requests(48, 8, 8, 8)
    for seq in (long, *short):
        own.submit(seq)
    assert own.admit() == short[:2], "a third would hold a page that the long one needs"
    own.release(old)
    assert own.admit() == [long]


def test_the_last_slot_is_left_to_one_without_room():
    own = scheduler(slots=3)
    (old,) = running(own, 38)
    long, *short = requests(48, 8, 8)
    for seq in (long, *short):
        own.submit(seq)
    assert own.admit() == short[:1]
    own.release(old)
    assert own.admit() == [long, short[1]]


def test_who_gave_way_is_passed_too():
    own = scheduler(slots=4)
    old, last = running(own, 28, 18)
    last.tokens += [2] * 20
    old.tokens += [2] * 12
    assert own.grow() == [last] and last.slot < 0
    own.submit(short := Sequence([1] * 8))
    assert own.admit() == [short]


def test_what_was_emitted_is_read_again_in_small_calls():
    own = scheduler()
    (seq,) = running(own, 12)
    seq.tokens += [4] * 9  # 12 of the prompt, 10 emitted, the last of them not fed
    own._give_way(seq)
    own.admit()
    stops = []
    while not (stops and own.chunk_done(seq, stops[-1])):
        chunk = own.next_chunk()
        assert chunk is not None and chunk[0] is seq
        stops.append(chunk[2])
    assert stops == [8, 12, 16, 20, 21]


def test_a_sequence_may_be_cancelled_while_it_waits_to_come_back():
    own = scheduler()
    first, second = running(own, 38, 8)
    first.tokens += [3] * 9
    second.tokens += [3] * 30
    assert own.grow() == [second]
    second.cancelled = True
    assert own.drop_cancelled() == [second] and not own.waiting
    assert own._room.held.total() == 1
