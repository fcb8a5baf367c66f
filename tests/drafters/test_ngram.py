"""Prompt lookup: which match wins, its cost, and the traced step, which makes the same guesses; the
host drafter also matches longer suffixes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from drafters.lookup.host import COMPARED, LookupTwin
from drafters.lookup.jax import TracedLookup
from drafters.ngram.host import NgramDrafter
from specdec.core.errors import UserError
from specdec.core.types import NO_GUESS, Sequence


def test_ngram_prefers_the_longest_suffix_then_the_latest_occurrence():
    drafter = NgramDrafter(2, 3)
    seq = Sequence([1, 2, 3, 40, 2, 3, 50, 1, 2, 3])
    seq.slot = 0
    drafter.reset(seq)
    assert drafter.propose([seq], 2).tokens.tolist() == [[40, 2]]
    seq.tokens[:] = [7, 2, 3, 40, 2, 3, 50, 1, 2, 3]
    drafter.reset(seq)
    assert drafter.propose([seq], 2).tokens.tolist() == [[50, 1]]


def test_ngram_says_nothing_from_a_single_token():
    drafter = NgramDrafter()
    seq = Sequence([1, 2, 3, 2])
    seq.slot = 0
    drafter.reset(seq)
    assert drafter.propose([seq], 3).tokens.tolist() == [[NO_GUESS] * 3]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 39))
def test_ngram_index_grows_as_if_built_at_once(tokens, first):
    grown, fresh = NgramDrafter(2, 4), NgramDrafter(2, 4)
    seq = Sequence(tokens[:first] or tokens[:1])
    seq.slot = 0
    grown.reset(seq)
    grown.propose([seq], 3)
    seq.tokens[:] = tokens if len(tokens) >= len(seq.tokens) else seq.tokens
    fresh.reset(seq)
    assert grown.propose([seq], 3).tokens.tolist() == fresh.propose([seq], 3).tokens.tolist()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=24), min_size=2, max_size=2))
def test_the_traced_twin_guesses_the_same(texts):
    """On the device the history is followed by whatever rejected drafts left there."""
    history = np.full((2, 32), 1, np.int32)
    for row, text in enumerate(texts):
        history[row, : len(text)] = text
    length = np.array([len(t) for t in texts], np.int32)
    for lengths in ((1, 3), (2, 5), (2, 20)):
        seqs = [Sequence(list(t), slot=slot) for slot, t in enumerate(texts)]
        host, twin = NgramDrafter(*lengths), LookupTwin(*lengths)
        for seq in seqs:
            host.reset(seq)
            twin.reset(seq)
        traced = np.asarray(TracedLookup(*lengths).propose(history, length, 6)).tolist()
        for drafter in (host, twin):
            assert drafter.propose(seqs, 6).tokens.tolist() == traced
        assert [host.matched(seq) for seq in seqs] == [twin.matched(seq) for seq in seqs]


def test_the_twin_finds_what_lies_far_back():
    seq = Sequence([1, 2, 3, *range(10, 100_000), 1, 2], slot=0)
    twin = LookupTwin(2, 32)
    twin.reset(seq)
    assert twin.propose([seq], 3).tokens.tolist() == [[3, 10, 11]] and twin.matched(seq) == 2
    seq.tokens += [7, 1, 2]
    assert twin.propose([seq], 3).tokens.tolist() == [[7, 1, 2]]


def test_the_twin_s_work_is_bounded_where_one_token_fills_the_text():
    twin = LookupTwin(2, 32)
    for others, guesses in ((COMPARED - 1, [9, 2]), (COMPARED, [NO_GUESS] * 2)):
        seq = Sequence([5, 2, 9, *[2] * others, 5, 2], slot=0)
        twin.reset(seq)
        assert twin.propose([seq], 2).tokens.tolist() == [guesses]


@given(st.lists(st.integers(0, 2), min_size=2, max_size=60), st.integers(1, 59))
def test_the_twin_guesses_what_the_kernel_does_while_the_text_grows(text, first):
    """The rule of sources/lookup.cu: (matched tokens, position), the greatest."""

    def matching(follow, end):
        pairs = zip(text[:follow][::-1][:4], text[:end][::-1], strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(follow, 4))

    seq = Sequence(text[:first], slot=0)
    twin = LookupTwin(2, 4)
    twin.reset(seq)
    twin.prefill(seq, 0, first // 2, None)
    for end in range(len(seq.tokens), len(text) + 1):
        seq.tokens[:] = text[:end]
        found = max(((matching(f, end), f) for f in range(1, end)), default=(0, 0))
        expected = [text[found[1] + i % (end - found[1])] for i in range(3)]
        guesses = twin.propose([seq], 3).tokens[0].tolist()
        assert guesses == (expected if found[0] >= 2 else [NO_GUESS] * 3)


def test_a_long_prefix_that_needed_no_prefill_is_read_bit_by_bit():
    seq = Sequence([*range(100, 10_000), 1, 2, 3, 4, 1, 2], slot=0)
    drafter, reads = NgramDrafter(), []
    drafter.reset(seq)
    drafter.prefill(seq, 9_000, len(seq.tokens), None)
    for _ in range(4):
        reads.append(drafter._indices[0].indexed)
        guesses = drafter.propose([seq], 2).tokens[0].tolist()
        assert (guesses == [3, 4]) == (drafter._indices[0].indexed == len(seq.tokens))
    assert reads == [2048, 4096, 6144, 8192] and drafter.matched(seq) == 2


def test_a_match_that_reaches_the_end_repeats_with_its_period():
    drafter = NgramDrafter()
    seq = Sequence([8, 1, 2, 1, 2])
    seq.slot = 0
    drafter.reset(seq)
    assert drafter.propose([seq], 5).tokens.tolist() == [[1, 2, 1, 2, 1]]


def test_the_index_does_not_look_back():
    """Cost per cycle is independent of context length: only new tokens are indexed."""

    class Counting(list):
        reads = 0

        def __getitem__(self, key):
            Counting.reads += 1
            return super().__getitem__(key)

    drafter = NgramDrafter()
    seq = Sequence([1])
    seq.slot = 0
    seq.tokens = Counting(range(50_000))
    drafter.reset(seq)
    for stop in range(2000, 50_001, 2000):
        drafter.prefill(seq, stop - 2000, stop, None)
    Counting.reads = 0
    seq.tokens.extend([3, 4, 5])
    drafter.propose([seq], 4)
    assert Counting.reads < 40


@pytest.mark.parametrize(("n_min", "n_max"), [(0, 3), (4, 3)])
def test_lengths_that_make_no_sense(n_min, n_max):
    with pytest.raises(UserError, match="n_min"):
        NgramDrafter(n_min, n_max)
