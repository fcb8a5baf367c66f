"""Tokens become text: whatever their grouping, cut where a stop string begins."""

from __future__ import annotations

from hypothesis import given, strategies as st

from serve.runner import Update
from serve.stream import ChoiceText, held_back
from specdec.core.types import TokenLogprob
from tests.support.fakes_text import ALPHABET, EOS, CharTokenizer, HalvesTokenizer


@given(
    st.lists(st.integers(2, 8), max_size=30),
    st.lists(st.integers(1, 4), min_size=30, max_size=30),
    st.lists(st.text("abcdefg", min_size=1, max_size=3), max_size=3),
    st.sampled_from(["stop", "length"]),
)
def test_text_never_depends_on_how_tokens_were_grouped(ids, sizes, stops, finish):
    """The oracle reads the whole text, token by token, and cuts at the first stop string."""
    whole = CharTokenizer().decode(ids)
    cuts = [whole[:n].find(s) for n in range(len(whole) + 1) for s in stops if s in whole[:n]]
    ends = [n for n in range(len(whole) + 1) if any(s in whole[:n] for s in stops)]
    choice, text, tokens, done = ChoiceText(CharTokenizer(), stops), "", [], None
    rest = [*ids, EOS] if finish == "stop" else ids
    groups = []
    for size in sizes:
        groups.append(rest[:size])
        rest = rest[size:]
    while groups and not groups[-1]:
        groups.pop()
    for i, group in enumerate(groups or [[]]):
        last = i == max(len(groups) - 1, 0)
        logprobs = tuple(TokenLogprob(-1.0, (), 0, b"") for _ in group)
        update = Update(0, tuple(group), logprobs, finish if last else None)
        piece = choice.feed(update)
        text += piece.text
        tokens += piece.tokens
        done = piece.finish
        if done:
            break
    if not ends:
        assert (text, done) == (whole, finish)
    else:
        assert done == "stop" and whole.startswith(text) and len(text) in cuts
        assert not any(s in text for s in stops)
    assert "".join(t.text for t in tokens) == text
    assert [t.offset for t in tokens] == list(range(len(text)))


def test_half_a_character_waits_for_the_other_half():
    tokens = [ALPHABET.index(c) for c in "a.b.c".replace(".", "x")]
    choice = ChoiceText(HalvesTokenizer(), ["b"])
    logprobs = (TokenLogprob(-1.0, (), 0, b""),)
    pieces = [choice.feed(Update(0, (t,), logprobs)) for t in tokens[:3]]
    assert [p.text for p in pieces] == ["", "a", ""]
    assert [len(p.tokens) for p in pieces] == [0, 2, 0]
    last = choice.feed(Update(0, (tokens[3],), logprobs))
    assert (last.text, last.tokens, last.finish) == ("", (), "stop")
    tail = ChoiceText(HalvesTokenizer()).feed(Update(0, tuple(tokens), logprobs * 5, "length"))
    assert (tail.text, len(tail.tokens)) == ("ab\ufffd", 5)


def test_held_back_is_the_longest_suffix_that_may_begin_a_stop():
    assert held_back("say </s", ["</s>", "s>"]) == 3
    assert held_back("abab", ["abac"]) == 2
    assert held_back("abc", ["x", "abd"]) == 0
    assert held_back("abc", []) == 0
