"""Suffix lookup finds the longest suffix that occurred before and its most frequent continuation,
stores answers within bounds and scopes, and changes no token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from drafters.suffix.answers import Answers
from drafters.suffix.automaton import Match, SuffixAutomaton
from drafters.suffix.host import SuffixDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.types import NO_GUESS, Reuse, Sequence
from tests.support.commands import refused
from tests.support.fakes import FakeTarget

TEXTS = st.lists(st.integers(0, 3), max_size=40)


def read(automaton: SuffixAutomaton, text: list[int]) -> Match:
    match = Match()
    for token in text:
        match = automaton.advanced(match, token)
        automaton.append(token)
    return match


def holds(text: list[int], part: list[int]) -> bool:
    return any(text[i : i + len(part)] == part for i in range(len(text) - len(part) + 1))


def after(text: list[int], part: list[int]) -> list[int]:
    """What comes next after each occurrence that is not the text's end."""
    places = range(len(text) - len(part))
    return [text[i + len(part)] for i in places if text[i : i + len(part)] == part]


@given(TEXTS)
def test_the_longest_suffix_that_occurred_before_is_found(text):
    automaton, match = SuffixAutomaton(), Match()
    for i, token in enumerate(text):
        match = automaton.advanced(match, token)
        automaton.append(token)
        now = text[: i + 1]
        earlier = (n for n in range(i, 0, -1) if holds(now[:-1], now[len(now) - n :]))
        assert match.length == next(earlier, 0), now


@given(TEXTS, TEXTS)
def test_a_place_in_another_text_is_found_while_that_grows(text, other):
    """The automaton splits states meanwhile; the match stays the longest."""
    automaton, match = SuffixAutomaton(), Match()
    for i, token in enumerate(text):
        if i < len(other):
            automaton.append(other[i])
        match = automaton.advanced(match, token)
        there = other[: i + 1]
        ends = (n for n in range(i + 1, 0, -1) if holds(there, text[i + 1 - n : i + 1]))
        longest = next(ends, 0)
        # what was appended since may hold more of the text than was looked for
        assert match.length <= longest
        assert not match.length or holds(there, text[i + 1 - match.length : i + 1])


@given(TEXTS.filter(len))
def test_what_came_next_most_often_goes_on(text):
    automaton = SuffixAutomaton()
    match = read(automaton, text)
    guesses = automaton.continuation(match, 6)
    if not match.length:
        assert guesses == []
        return
    suffix = text[len(text) - match.length :]
    # a text of 40 tokens is short enough for all of a suffix's occurrences to be counted
    came = after(text, suffix)
    assert guesses[0] in came
    assert came.count(guesses[0]) == max(map(came.count, came))
    assert len(guesses) == 6


def test_a_text_that_repeats_itself_goes_on_doing_so():
    automaton = SuffixAutomaton()
    match = read(automaton, [7, 8, 9] * 3)
    assert match.length == 6 and automaton.continuation(match, 7) == [7, 8, 9, 7, 8, 9, 7]
    assert automaton.continuation(Match(), 3) == []


def test_a_parted_text_holds_nothing_across_the_seam():
    automaton = SuffixAutomaton()
    read(automaton, [1, 2, 3])
    automaton.part()
    read(automaton, [4, 5])
    assert read_only(automaton, [3, 4]).length == 1
    assert read_only(automaton, [1, 2, 3]).length == 3
    assert automaton.continuation(read_only(automaton, [3]), 2) == []


def read_only(automaton: SuffixAutomaton, text: list[int]) -> Match:
    match = Match()
    for token in text:
        match = automaton.advanced(match, token)
    return match


def test_the_work_per_token_does_not_grow_with_the_text(monkeypatch):
    """Counts the states touched per token, in a text that repeats one token and in a random one."""
    touched = 0
    honest = SuffixAutomaton._prefer

    def counted(self, state, token):
        nonlocal touched
        touched += 1
        honest(self, state, token)

    monkeypatch.setattr(SuffixAutomaton, "_prefer", counted)
    for text in ([5] * 3000, np.random.default_rng(0).integers(0, 9, 3000).tolist()):
        touched, automaton = 0, SuffixAutomaton()
        read(automaton, text)
        assert touched < 40 * len(text) and len(automaton._next) <= 2 * len(text) + 1


def test_it_guesses_what_followed():
    drafter, seq = SuffixDrafter(2), Sequence([7, 8, 9, 4, 7, 8], slot=0)
    drafter.reset(seq)
    assert drafter.propose([seq], 3).tokens.tolist() == [[9, 4, 7]] and drafter.matched(seq) == 2


def test_after_an_edit_it_goes_on_where_it_was():
    text = list(range(10, 60))
    drafter, seq = SuffixDrafter(2), Sequence([*text, 3], slot=0)
    drafter.reset(seq)
    seq.tokens += text[:10]
    assert drafter.propose([seq], 3).tokens.tolist() == [text[10:13]]
    seq.tokens += [4]  # more than there was
    assert drafter.propose([seq], 3).tokens.tolist() == [text[10:13]] and drafter.matched(seq) == 0
    seq.tokens += [text[12]]  # less than there was
    assert drafter.propose([seq], 3).tokens.tolist() == [text[13:16]]


def test_nothing_is_guessed_where_nothing_is_known():
    drafter, seq = SuffixDrafter(2), Sequence([7, 8, 9], slot=0)
    drafter.reset(seq)
    assert (drafter.propose([seq], 3).tokens == NO_GUESS).all()


def answered(drafter, answer, slot=0, scope="", reuse=True):
    """A request that has ended."""
    seq = Sequence([1], slot=slot, reuse=Reuse(scope) if reuse else None)
    drafter.reset(seq)
    seq.tokens += answer
    drafter.propose([seq], 1)
    seq.finish = "stop"


def asked(drafter, prompt, scope="", reuse=True) -> list[int]:
    seq = Sequence(prompt, slot=0, reuse=Reuse(scope) if reuse else None)
    drafter.reset(seq)
    return [t for t in drafter.propose([seq], 3).tokens[0].tolist() if t != NO_GUESS]


def test_others_answers_are_looked_at_in_the_same_scope_only():
    drafter = SuffixDrafter(2, answers=100)
    answered(drafter, [20, 21, 22, 23, 24], scope="a")
    assert asked(drafter, [20, 21], "a") == [22, 23, 24]
    assert asked(drafter, [20, 21], "b") == []
    assert asked(drafter, [20, 21], "a", reuse=False) == []
    answered(drafter, [30, 31, 32], scope="a", reuse=False)
    assert asked(drafter, [30, 31], "a") == []
    assert asked(SuffixDrafter(2), [20, 21], "a") == []


def test_its_own_text_is_believed_before_anothers():
    drafter = SuffixDrafter(2, answers=100)
    answered(drafter, [20, 21, 22])
    assert asked(drafter, [20, 21, 29, 20, 21]) == [29, 20, 21]


def test_an_answer_that_ends_meanwhile_is_found():
    drafter, seq = SuffixDrafter(2, answers=100), Sequence([20, 21], slot=1)
    drafter.reset(seq)
    assert (drafter.propose([seq], 2).tokens == NO_GUESS).all()
    answered(drafter, [20, 21, 22, 23])
    assert drafter.propose([seq], 2).tokens.tolist() == [[22, 23]]


@given(st.lists(st.tuples(st.sampled_from("abc"), TEXTS)), st.integers(0, 30))
def test_answers_stay_within_their_bound(kept, most):
    answers = Answers(most)
    for scope, text in kept:
        answers.keep(scope, text)
        assert answers.size <= most
    if kept and kept[-1][1] and most >= 2:
        scope, text = kept[-1]
        whole = text[-(most // 2) :]
        assert any(read_only(where, whole).length == len(whole) for where in answers.of(scope))


def test_a_scope_without_an_answer_takes_no_memory():
    drafter = SuffixDrafter(2, answers=100)
    for scope in "abcd":
        answered(drafter, [], scope)
    assert not drafter._answers._shelves


def test_a_long_prefix_that_needed_no_prefill_is_read_bit_by_bit():
    text = np.random.default_rng(0).integers(0, 9000, 9_990).tolist() + [1, 2, 3, 4, 1, 2]
    lazy, whole = Sequence(list(text), slot=0), Sequence(list(text), slot=1)
    drafter = SuffixDrafter(2)
    for seq in (lazy, whole):
        drafter.reset(seq)
    for stop in range(1000, len(text) + 1000, 1000):
        drafter.prefill(whole, 0, min(stop, len(text)), None)
    drafter.prefill(lazy, 9_900, len(text), None)
    sizes, guesses = [], []
    for _ in range(4):
        sizes.append(drafter._rows[0].own.size)
        guesses = drafter.propose([lazy], 2).tokens[0].tolist()
        assert (guesses == [NO_GUESS] * 2) == (drafter._rows[0].own.size < len(text))
    assert sizes == [2048, 4096, 6144, 8192]
    assert [guesses] == drafter.propose([whole], 2).tokens.tolist() == [[3, 4]]


def decoded(make, k: int) -> list[list[int]]:
    target, drafter = FakeTarget(slots=2, vocab=3), make()
    engine = Engine(target, drafter, host_cycle(target, drafter, k))
    prompts = np.random.default_rng(0).integers(0, 3, (6, 12)).tolist()
    seqs = [Sequence(prompt, max_tokens=40) for prompt in prompts]
    engine.run_to_end(seqs)
    assert k == 0 or engine.acceptance.accepted > 0
    return [seq.tokens for seq in seqs]


@pytest.mark.parametrize("answers", [0, 50, 1000])
def test_it_changes_no_token(answers):
    plain = decoded(SuffixDrafter, 0)
    assert all(decoded(lambda: SuffixDrafter(1, answers), k) == plain for k in (1, 7))


@pytest.mark.parametrize("option", ["--suffix-min=0", "--suffix-answers=-1"])
def test_bad_options_are_one_line(capsys, option):
    line = refused(capsys, "generate", "x", "--drafter", "suffix", option)
    assert option.split("=")[0] in line
