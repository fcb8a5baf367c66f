"""Grammars that fail while a text is written: that request ends, at the same token whatever was
drafted, and the others go on. Their matchers are stand-ins: which of llguidance's errors come late
is not known."""

from __future__ import annotations

import numpy as np
import pytest

from drafters.none.host import NoDrafter
from specdec.constraints import compiled, constraint as module
from specdec.constraints.constraint import TextConstraint, TextRules
from specdec.constraints.json_schema import json_grammar
from specdec.constraints.trial import TRIALS
from specdec.constraints.vocabulary import CACHED, Vocabulary
from specdec.core.constraint import EVERYTHING, mask_rows, mask_words
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.errors import UserError
from specdec.core.types import Proposal, Sequence
from tests.support.constrained import mini_tokenizer
from tests.support.fakes import FakeTarget

K = 4
LENGTH = 8
WRONG = "the reason"


class Matcher:
    """Allows everything, until it has read `bad`."""

    def __init__(self, bad: int) -> None:
        self.bad, self.read, self.failed = bad, 0, False

    def consume_token(self, token: int) -> bool:
        self.read += 1
        self.failed = self.failed or token == self.bad
        return not self.failed

    def unsafe_compute_mask_ptr(self, place: int, size: int) -> None:
        pass

    def is_error(self) -> bool:
        return self.failed

    def get_error(self) -> str:
        return WRONG

    def deep_copy(self) -> Matcher:
        return Matcher(self.bad)

    def compute_ff_bytes(self) -> bytes:
        return b""


class Executor:
    """llguidance's, for these."""

    def unsafe_compute_mask_ptr_with_draft_token(self, job, place: int, size: int, rows: int):
        ((matcher, _, draft),) = job
        matcher.failed = matcher.failed or matcher.bad in draft


class Tables:
    """Stands for a `Compiled`. grown: whether it is overgrown at each call."""

    def __init__(self, bad: int, grown: bool = False) -> None:
        self.bad, self.grown = bad, grown

    def copy(self) -> Matcher:
        return Matcher(self.bad)

    def overgrown(self) -> bool:
        return self.grown

    def settle(self) -> None:
        pass


class Words:
    """Stands for a `Vocabulary`. most: how often a grammar compiles before it is refused."""

    stop_ids = ()

    def __init__(self, tables: Tables, most: int = 99) -> None:
        self.tables, self.most = tables, most

    def compiled(self, grammar: str, tried: bool = False) -> Tables:
        self.most -= 1
        if self.most < 0:
            raise UserError(WRONG)
        return self.tables

    def tokens_of(self, text: bytes) -> list[int]:
        return []


class Asking(FakeTarget):
    """Makes masks where a real target does. They allow everything."""

    def prefill(self, seq, start, stop):
        mask_rows([seq], np.empty((1, 0), np.int32), self.vocab)
        return super().prefill(seq, start, stop)

    def verify(self, seqs, draft):
        mask_rows(seqs, draft, self.vocab)
        return super().verify(seqs, draft)


class Guessing(NoDrafter):
    """The same guesses behind every text, or those that are right, with `bad` at one place."""

    def __init__(self, plain: list[int], bad: int, at: int | None) -> None:
        self.plain, self.bad, self.at = plain, bad, at

    def propose(self, seqs, k):
        draft = np.full((len(seqs), k), -1, np.int32)
        for b, seq in enumerate(seqs):
            coming = self.plain[seq.emitted :][:k]
            draft[b, : len(coming)] = coming
            if self.at is not None:
                draft[b, self.at] = self.bad
        return Proposal(draft)


def text_of(drafter, k: int, bad: int) -> tuple[list[int], str | None, list[str]]:
    """The text, its end, and the errors of events: these have no tokens."""
    target = Asking()
    rules, words = TextRules(grammar="any"), Words(Tables(bad))
    seq = Sequence([3], max_tokens=LENGTH, constraint=TextConstraint(rules, words))  # pyright: ignore
    events = list(Engine(target, drafter, host_cycle(target, drafter, k)).run([seq]))
    told = [token for event in events for token in event.tokens]
    assert told == seq.tokens[1:] and not any(e.tokens for e in events if e.error)
    assert [event.finish for event in events if event.finish] == [seq.finish]
    return told, seq.finish, [event.error for event in events if event.error]


@pytest.fixture
def plain(monkeypatch) -> list[int]:
    monkeypatch.setattr(module, "_EXECUTOR", Executor())
    return text_of(NoDrafter(), 0, -1)[0]


@pytest.mark.parametrize("at", range(K))
def test_a_failure_behind_a_rejected_guess_ends_nothing(plain, at):
    bad = next(token for token in range(50) if token not in plain)
    assert text_of(Guessing(plain, bad, at), K, bad) == (plain, "length", [])


@pytest.mark.parametrize("at", range(LENGTH))
def test_a_failure_ends_a_text_at_the_same_token_whatever_was_drafted(plain, at):
    """Its first token too, which follows the prompt; the last is not read any more."""
    bad = plain[at]
    expected = text_of(NoDrafter(), 0, bad)
    first = plain.index(bad)
    assert expected[0] == plain[: first + 1]
    assert expected[1:] == (("length", []) if first == LENGTH - 1 else ("error", expected[2]))
    assert all(WRONG in error for error in expected[2])
    for guesses in (Guessing(plain, bad, None), Guessing(plain, bad, 0), Guessing(plain, bad, 2)):
        assert text_of(guesses, K, bad) == expected


@pytest.mark.parametrize("k", [0, K])
def test_a_grammar_that_is_refused_when_its_tables_are_made_anew_fails_alone(monkeypatch, k):
    """These have grown too large after 16 tokens."""
    monkeypatch.setattr(module, "_EXECUTOR", Executor())
    target, drafter = Asking(), Guessing([], -1, None)
    words = Words(Tables(-1, grown=True), most=1)
    rules = TextRules(grammar="any")
    grown = Sequence([3], max_tokens=40, constraint=TextConstraint(rules, words))  # pyright: ignore
    beside = Sequence([5], max_tokens=40)
    events = list(Engine(target, drafter, host_cycle(target, drafter, k)).run([grown, beside]))
    assert [event.error for event in events if event.error] == [WRONG]
    assert (grown.finish, beside.finish, beside.emitted) == ("error", "length", 40)
    assert grown.emitted >= module.MEASURED_EVERY


def test_a_grammar_that_both_caches_forgot_is_not_tried_again(monkeypatch):
    """It passed once; while texts are decoded nothing waits for a trial, or is compiled that is
    still there."""
    vocabulary, grammar = Vocabulary(mini_tokenizer()), json_grammar({"type": "integer"})
    own = TextConstraint(TextRules(grammar=grammar), vocabulary)
    held, seq = own._compiled, Sequence([2], constraint=own)
    for number in range(CACHED + 1):
        vocabulary.compiled(json_grammar({"const": number}))
    assert held is not None and grammar not in vocabulary._grammars
    monkeypatch.setattr(TRIALS, "refusal", lambda grammar: "it is tried")
    assert own._again() and own._compiled is held
    monkeypatch.setattr(compiled, "GROWN_BYTES", -1)
    held.settle()
    out = np.full((1, mask_words(vocabulary.size)), EVERYTHING, np.uint32)
    seq.tokens += vocabulary.load().tokenize_str("1" * 20)
    own.masks(seq, [], out)
    assert own.failure is None and own._compiled is not held
