"""Rules on ids bar exactly the tokens of their definition, for any text and draft."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from specdec.constraints.rules import FEW, AllowedTokens, BadWords, LeastTokens, only

VOCAB = 64
WORDS = VOCAB // 32
token = st.integers(0, 3)
word = st.lists(token, min_size=1, max_size=4)


def allowed(masks: np.ndarray) -> list[set[int]]:
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def restricted(rule, draft: list[int]) -> list[set[int]]:
    masks = np.full((len(draft) + 1, WORDS), 0xFFFFFFFF, np.uint32)
    rule.restrict(draft, masks)
    return allowed(masks)


@given(st.lists(word, max_size=8), st.lists(token, max_size=12), st.lists(token, max_size=5))
def test_bad_words_are_the_last_tokens_of_words_that_the_text_begins(words, text, draft):
    rule = BadWords(words)
    for piece in (text[:5], text[5:]):
        rule.advance(piece)
    for j, found in enumerate(restricted(rule, draft)):
        before = [*text, *draft[:j]]
        barred = {w[-1] for w in words if not w[:-1] or before[-len(w[:-1]) :] == w[:-1]}
        assert found == set(range(VOCAB)) - barred


def test_masks_of_many_states_are_bounded(monkeypatch):
    monkeypatch.setattr(BadWords, "KEPT", 2)
    rule = BadWords([[a, b] for a in range(8) for b in range(8)])
    for first in [*range(8), *range(8)]:
        assert restricted(rule, [first])[1] == set(range(8, VOCAB))
    assert len(rule._keep) == 2


@pytest.mark.parametrize("count", [0, 1, FEW, FEW + 1])
def test_a_mask_of_any_number_of_tokens(count):
    tokens = np.random.default_rng(count).permutation(4096)[:count].tolist()
    assert allowed(only(tokens + tokens, 4096 // 32)[None]) == [set(tokens)]


def test_stop_ids_are_kept_away_for_the_first_tokens_alone():
    rule = LeastTokens(3, [1, 2])
    rule.advance([5])
    everything = set(range(VOCAB))
    assert restricted(rule, [7, 7]) == [everything - {1, 2}] * 2 + [everything]
    assert restricted(AllowedTokens([4, 40]), [4]) == [{4, 40}] * 2
