"""Prompts that are read together, and chunks that are read in parts: the same tokens, and no
sequence waits for a whole chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seqs

import pytest
from hypothesis import given, strategies as st

from drafters.ngram.host import NgramDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.types import Sampling, Sequence, Step
from tests.support.fakes import FakeTarget

CHUNK = 32
PART = 8


class Reader(FakeTarget):
    """Reads a chunk in parts of PART tokens, and up to four prompts of as many 8s of tokens at
    once. A part of which the rest was dropped leaves the slot unusable."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots=slots, chunk=CHUNK)
        self.calls: list[list[str]] = []

    def prefill_parts(self, seq: Sequence, start: int, stop: int) -> Iterator[Step | None]:
        for at in range(start, stop - PART, PART):
            self.calls.append([seq.request_id])
            self.fed[seq.slot, at : at + PART] = -3
            yield None
        self.calls.append([seq.request_id])
        yield self.prefill(seq, start, stop)

    def together(self, lengths: Seqs[int]) -> list[int]:
        alike = [i for i, n in enumerate(lengths) if n // 8 == lengths[0] // 8]
        return alike[:4] if lengths[0] <= CHUNK // 2 else [0]

    def prefill_all(self, seqs: Seqs[Sequence]) -> list[Step]:
        self.calls.append([seq.request_id for seq in seqs])
        if any(13 in seq.tokens for seq in seqs):
            raise MemoryError("no room for thirteen")
        return [self.prefill(seq, 0, seq.prompt_len) for seq in seqs]

    def prefill(self, seq: Sequence, start: int, stop: int) -> Step:
        if 13 in seq.tokens[start:stop]:
            raise MemoryError("no room for thirteen")
        return super().prefill(seq, start, stop)


def sequences(prompts: list[list[int]]) -> list[Sequence]:
    return [
        Sequence(list(ids), Sampling(seed=i), max_tokens=9, request_id=str(i))
        for i, ids in enumerate(prompts)
    ]


def engine_of(target: FakeTarget) -> Engine:
    drafter = NgramDrafter()
    return Engine(target, drafter, host_cycle(target, drafter, 3))


def text_of(prompts: list[list[int]], number: int) -> list[int]:
    """Prompt and answer of one that has the engine for itself."""
    seq = sequences(prompts)[number]
    engine_of(FakeTarget(slots=1, chunk=CHUNK)).run_to_end([seq])
    return seq.tokens


@given(st.lists(st.integers(1, 90), min_size=1, max_size=9), st.integers(1, 6), st.data())
def test_no_token_depends_on_what_is_read_together(lengths, slots, data):
    """Prompts of any lengths, some of which leave while they are read."""
    prompts = [[(i * n) % 12 for i in range(n)] for n in lengths]
    leaving = data.draw(st.dictionaries(st.integers(0, len(lengths) - 1), st.integers(0, 12)))
    engine, seqs = engine_of(Reader(slots)), sequences(prompts)
    for seq in seqs:
        engine.submit(seq)
    turn = 0
    while not engine.idle:
        for number, when in leaving.items():
            seqs[number].cancelled |= turn == when
        engine.step()
        turn += 1
    for number in range(len(prompts)):
        text = text_of(prompts, number)
        if seqs[number].finish == "cancelled":
            assert text[: len(seqs[number].tokens)] == seqs[number].tokens
        else:
            assert seqs[number].tokens == text


def test_short_prompts_that_come_at_once_take_a_few_calls():
    target = Reader(16)
    engine_of(target).run_to_end(sequences([[1, 2, 3]] * 16))
    assert [len(call) for call in target.calls] == [4, 4, 4, 4]


def test_others_decode_between_the_parts_of_a_chunk():
    """And a short prompt does not wait for the chunk's end."""
    target = Reader(3)
    engine = engine_of(target)
    stream, long, short = sequences([[1], [2] * 32, [3] * 4])
    stream.max_tokens = 30
    engine.submit(stream)
    engine.step()
    engine.submit(long)
    engine.submit(short)
    shown = []
    while long.prefilled < 32:
        shown.append(bool(engine.step()))
    assert all(shown)  # each part, then a token
    assert ["2"] in target.calls[1:4]


@pytest.mark.parametrize("part", [8, 16])
def test_chunks_alternate_however_many_parts_they_have(part, monkeypatch):
    monkeypatch.setattr("tests.specdec.core.test_together.PART", part)
    long, short = sequences([[1] * 480, [2] * 24])
    engine = engine_of(Reader(2))
    engine.submit(long)
    while long.prefilled < CHUNK:
        engine.step()
    engine.submit(short)
    while not short.emitted:
        engine.step()
    assert long.prefilled <= 3 * CHUNK


@pytest.mark.parametrize("turns", [0, 1])
@pytest.mark.parametrize("part", [8, 16])
def test_a_long_prompt_is_read_beside_shorter_ones_without_end(part, turns, monkeypatch):
    """turns: that were taken before it came."""
    monkeypatch.setattr("tests.specdec.core.test_together.PART", part)
    (long,) = sequences([[1] * 320])
    engine = engine_of(Reader(3))
    for _ in range(turns):
        engine.run_to_end([Sequence([3] * 4, max_tokens=1)])
    engine.submit(long)
    for _ in range(100):
        if len(engine.scheduler.prefilling) < 2:
            engine.submit(Sequence([2] * 2 * CHUNK, max_tokens=1))
        engine.step()
    assert long.prefilled == 320


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_what_fails_beside_others_fails_alone(bad):
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    prompts[bad][1] = 13
    seqs = sequences(prompts)
    events = list(engine_of(Reader(3)).run(seqs))
    assert [seq.finish for seq in seqs].count("error") == 1 and seqs[bad].finish == "error"
    assert sum(event.error is not None for event in events) == 1
    kept = [i for i in range(3) if i != bad]
    assert [seqs[i].tokens for i in kept] == [text_of(prompts, i) for i in kept]
