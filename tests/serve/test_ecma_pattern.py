"""A schema's pattern and its translation find the same strings."""

from __future__ import annotations

import re
from functools import lru_cache

import pytest
from hypothesis import given, settings, strategies as st
from llguidance import LLMatcher

from serve.gemma.ecma_pattern import whole_regex
from specdec.core.errors import UserError
from tests.serve.mini_grammar import GRAMMAR_TOKENIZER, TOKENIZER

PATTERNS = [
    "",
    "a",
    "^a$",
    "^a|b$",
    "^(a|bc)+$",
    "^(?:ab){2,3}?$",
    "^(?<name>a)b*?$",
    r"^\d+\.\w\s?$",
    r"^[\w.-]+@[^\s@]+$",
    r"^[a\-z]$",
    r"^[^\d\]]*$",
    r"^[-a]+$",
    r"^[a-c-e]+$",
    r"^[a-c-]+$",
    r"^\D\W\S$",
    r"^a{2}b{1,}c{0,1}$",
    "a{",
    "^.*$",
    r"^\x41\u0042\t$",
    r"^[\x41-\u0043]+$",
    r"^[\b]$",
    r"^a/b~c&&d#\"'$",
    r"\[\]\{\}\(\)\^\$\|\\\/",
    r"^[\[&~]+$",
    "^a?$",
]


@lru_cache
def matcher_of(pattern: str) -> LLMatcher:
    lark = f"start: T\nT: /{whole_regex(pattern)}/"
    matcher = LLMatcher(GRAMMAR_TOKENIZER, LLMatcher.grammar_from_lark(lark))
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def finds(pattern: str, text: str) -> bool:
    """Character by character: a text may spell a control token, which no string holds."""
    matcher = matcher_of(pattern).deep_copy()
    ids = [token for character in text for token in TOKENIZER.encode(character)[1:]]
    whole = matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids)
    return whole and matcher.is_accepting()


CHARACTERS = "aabbccdzABC019._-@/~&#\"'[]{}()^$|\\ \t\b,:"


@settings(deadline=None, max_examples=400)
@given(st.sampled_from(PATTERNS), st.text(CHARACTERS, max_size=8), st.data())
def test_pythons_own_search_agrees_on_ascii(pattern, text, data):
    if data.draw(st.booleans()):
        text = data.draw(st.from_regex(re.compile(as_python(pattern), re.ASCII)))
        text = text.encode("ascii", "ignore").decode().replace("\n", "").replace("\r", "")
    assert finds(pattern, text) == bool(re.search(as_python(pattern), text, re.ASCII))


def test_a_text_may_spell_a_control_token():
    assert finds("", "<|turn>") and not finds("^a$", "<|turn>")


def as_python(pattern: str) -> str:
    return pattern.replace("(?<", "(?P<").replace("$", r"\Z").replace(r"\\Z", r"\$")


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        (r"^\d$", "\u0663", False),  # ECMA-262: only ASCII digits are digits
        (r"^\W$", "\u00e9", True),
        (r"^\s$", "\u00a0", True),
        (r"^\S$", "\u2003", False),
        ("^.$", "\u2028", False),
        ("^.$", "\U0001f600", True),
        (r"^\p{L}+$", "\u00e9a", True),
        (r"^[\p{Lu}x]$", "\u00c9", True),
        (r"^\u{1F600}$", "\U0001f600", True),
        ("^\u4e16+$", "\u4e16\u4e16", True),
        (r"^[\w-.]+$", "a-._", True),
        (r"^[.-\d]+$", "1-.", True),
        (r"^[.-\d]+$", "/", False),
    ],
)
def test_beyond_ascii_it_is_ecmas(pattern, text, found):
    assert finds(pattern, text) == found


REFUSED = ["(?=a)", "(?!a)", "(?<=a)b", r"(a)\1", r"\bword", r"a\Bb", "a^b", "a$b", "(^a)", "(a$)"]
REFUSED += [
    "*a",
    "a**",
    "[]",
    "[^]",
    "[a",
    "(a",
    "a)",
    "a\\",
    r"\k<n>",
    r"\cA",
    "(?i)a",
    "a{,2}",
    "[a-",
]


@pytest.mark.parametrize("pattern", REFUSED)
def test_what_has_no_translation_is_refused(pattern):
    with pytest.raises(UserError):
        whole_regex(pattern)
