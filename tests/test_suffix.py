"""Suffix lookup finds the longest suffix that occurred before, and changes no token."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from drafters.suffix.host import SuffixAutomaton, SuffixDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.types import NO_GUESS, Sequence
from tests.commands import refused
from tests.fakes import FakeTarget


def by_hand(text: list[int]) -> tuple[int, int]:
    """Length of the longest suffix with an earlier occurrence, and what follows the first one."""
    for length in range(len(text) - 1, 0, -1):
        for start in range(len(text) - length):
            if text[start : start + length] == text[-length:]:
                return length, start + length
    return 0, 0


@given(st.lists(st.integers(0, 3), max_size=40))
def test_the_automaton_finds_what_a_search_finds(text):
    automaton = SuffixAutomaton()
    for i, token in enumerate(text):
        automaton.append(token)
        assert (automaton.matched, automaton.follow) == by_hand(text[: i + 1]), text[: i + 1]


def test_it_guesses_what_followed():
    drafter, seq = SuffixDrafter(2), Sequence([7, 8, 9, 4, 7, 8], slot=0)
    drafter.reset(seq)
    assert drafter.propose([seq], 3).tolist() == [[9, 4, 7]]
    seq.tokens += [5]
    assert (drafter.propose([seq], 3) == NO_GUESS).all()


def test_it_changes_no_token():
    def decoded(k: int) -> list[list[int]]:
        target, drafter = FakeTarget(slots=2, vocab=3), SuffixDrafter(1)
        engine = Engine(target, drafter, host_cycle(target, drafter, k))
        prompts = np.random.default_rng(0).integers(0, 3, (4, 12)).tolist()
        seqs = [Sequence(prompt, max_tokens=40) for prompt in prompts]
        engine.run_to_end(seqs)
        assert k == 0 or engine.acceptance.accepted > 0
        return [seq.tokens for seq in seqs]

    assert decoded(0) == decoded(1) == decoded(7)


def test_bad_options_are_one_line(capsys):
    assert "--suffix-min" in refused(
        capsys, "generate", "x", "--drafter", "suffix", "--suffix-min", "0"
    )
