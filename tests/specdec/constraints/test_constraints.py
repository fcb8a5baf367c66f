"""Constrained text: a mask is a function of the ids before it, and no drafter changes a token."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from drafters import registry
from specdec.assembly.engine import make_engine
from specdec.assembly.model import load_model
from specdec.constraints.constraint import TextConstraint, TextRules, unpacked
from specdec.constraints.grammar import composed
from specdec.constraints.json_schema import json_grammar
from specdec.constraints.recite import Recite
from specdec.constraints.rules import ThinkingLimit
from specdec.core.config import ModelConfig
from specdec.core.constraint import EVERYTHING, forced_prefix_of, mask_rows, put_forced_first
from specdec.core.errors import UserError
from specdec.core.types import NO_GUESS, Sampling, Sequence
from tests.support.constrained import (
    AMBIGUOUS,
    SCHEMA,
    mini_tokenizer,
    mini_vocabulary,
    requests,
    rules,
    texts,
)

VOCAB = 70
IDS = st.integers(2, VOCAB - 1)


def allowed(mask: np.ndarray) -> set[int]:
    return {i for i in range(len(mask) * 32) if mask[i // 32] >> (i % 32) & 1}


def mask_after(rule: TextRules, text: list[int], vocabulary=None) -> set[int]:
    """What a fresh constraint allows after a text."""
    seq = Sequence([2], constraint=TextConstraint(rule, vocabulary or _NoGrammar()))
    seq.tokens += text
    masks = mask_rows([seq], np.empty((1, 0), np.int32), VOCAB if vocabulary is None else 4096)
    assert masks is not None
    return allowed(masks[0, 0])


class _NoGrammar:
    stop_ids = (0, 1)


RULES = st.builds(
    TextRules,
    bad_words=st.lists(st.lists(IDS, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    min_tokens=st.integers(0, 6),
    stop_ids=st.just((0, 1)),
    allowed=st.none() | st.sets(IDS, min_size=1).map(tuple),
    budget=st.none()
    | st.builds(ThinkingLimit, st.just(5), st.just(6), st.integers(0, 3), st.booleans()),
)


@settings(deadline=None)
@given(RULES, st.lists(IDS, max_size=8), st.lists(IDS, max_size=5))
def test_masks_of_a_draft_are_those_of_the_text_that_it_would_make(rule, text, draft):
    seq = Sequence([2], constraint=TextConstraint(rule, _NoGrammar()))
    seq.tokens += text
    masks = mask_rows([seq], np.array([draft], np.int32).reshape(1, -1), VOCAB)
    for j in range(len(draft) + 1):
        assert allowed(masks[0, j]) == mask_after(rule, text + draft[:j])


@settings(deadline=None)
@given(st.lists(IDS, max_size=12))
def test_what_each_rule_forbids(text):
    everything = set(range(96))  # whole words
    assert mask_after(TextRules(allowed=(7, 9)), text) == {7, 9}
    stops = {0, 1} if len(text) < 5 else set()
    assert mask_after(TextRules(min_tokens=5, stop_ids=(0, 1)), text) == everything - stops
    bad = {8} if text[-1:] == [7] else set()
    assert mask_after(TextRules(bad_words=((7, 8),)), text) == everything - bad
    thought = text[: text.index(6)] if 6 in text else text
    if thought == text:  # begun in the prompt, and still open
        full = {6} if len(text) >= 4 else everything
        assert mask_after(TextRules(budget=ThinkingLimit(5, 6, 4, inside=True)), text) == full


def test_a_grammars_masks_follow_drafts_and_end_with_every_stop_id():
    vocabulary = mini_vocabulary()
    rule = TextRules(grammar=json_grammar({"enum": ["ab", "ac"]}))
    ids = vocabulary.load().tokenize_str('"ac"')
    seq = Sequence([2], constraint=TextConstraint(rule, vocabulary))
    masks = mask_rows([seq], np.array([[*ids, 0]], np.int32), vocabulary.size)
    for j in range(len(ids) + 1):
        assert allowed(masks[0, j]) == mask_after(rule, ids[:j], vocabulary)
    assert allowed(masks[0, len(ids)]) >= set(vocabulary.stop_ids)


def test_any_way_to_write_a_text_in_tokens_is_allowed():
    """llguidance's own masks allow one way alone where the bytes are forced."""
    vocabulary = mini_vocabulary()
    rule = TextRules(grammar=json_grammar({"const": "Country"}))
    letters = [vocabulary.load().tokenize_str(letter)[0] for letter in '"Country"']
    for at, letter in enumerate(letters):
        assert letter in mask_after(rule, letters[:at], vocabulary)


def test_where_rules_contradict_the_grammar_wins():
    vocabulary = mini_vocabulary()
    quote = vocabulary.load().tokenize_str('"')
    grammar = json_grammar({"const": "a"})
    both = TextRules(grammar=grammar, bad_words=tuple((t,) for t in range(4096)))
    assert mask_after(both, quote, vocabulary) == mask_after(
        TextRules(grammar=grammar), quote, vocabulary
    )


def test_wild_guesses_end_a_draft():
    seq = Sequence([2], constraint=TextConstraint(TextRules(allowed=(7,)), _NoGrammar()))
    masks = mask_rows([seq, Sequence([2])], np.array([[7, -9, 7], [1, 2, 3]], np.int32), VOCAB)
    assert allowed(masks[0, 0]) == allowed(masks[0, 1]) == {7}
    assert (masks[1] == EVERYTHING).all()
    assert mask_rows([Sequence([2])], np.array([[1]], np.int32), VOCAB) is None


def test_forced_tokens_lead_and_guesses_go_on_where_they_agree():
    forced = np.array([[4, 5, NO_GUESS], [4, 5, NO_GUESS], [NO_GUESS] * 3])
    draft = np.array([[4, 5, 6], [4, 9, 6], [1, 2, 3]])
    assert put_forced_first(forced, draft).tolist() == [[4, 5, 6], [4, 5, NO_GUESS], [1, 2, 3]]


def test_forced_tokens_are_what_a_schema_leaves_no_choice_about():
    vocabulary = mini_vocabulary()
    grammar = json_grammar({"const": "quicksort of items"})
    seq = Sequence([2], constraint=TextConstraint(TextRules(grammar=grammar), vocabulary))
    seq.tokens += vocabulary.load().tokenize_str('"quick')
    (row,) = forced_prefix_of([seq], 31).rows
    forced = [int(t) for t in row if t != NO_GUESS]
    assert vocabulary.load().decode_str(forced) == 'sort of items"'


def test_a_constraint_survives_its_way_to_another_process():
    vocabulary = mini_vocabulary()
    for rule in rules():
        if rule is None:
            continue
        there = unpacked(
            json.loads(json.dumps(TextConstraint(rule, vocabulary).packed())), vocabulary
        )
        assert there.rules == rule
    recite = unpacked(json.loads(json.dumps(Recite([3, 4, 5]).packed())), vocabulary)
    assert recite.forced(Sequence([3])) == [4, 5]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {}, "b": {}}, "minProperties": 1}, "min/maxProperties"),
        ({"not": {"type": "string"}}, "not"),
        ({"oneOf": [{"type": "string"}, {"maxLength": 3}]}, "oneOf"),
        ({"type": "string", "pattern": "("}, "regex"),
        ({"$ref": "http://127.0.0.1:9/x"}, "127.0.0.1"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        (False, "nothing is valid"),
        ({"format": []}, "format"),
        ({"oneOf": [{"type": [[]]}, {"type": 7}]}, "followed exactly"),
        ({"format": "date", "allOf": 7}, "followed exactly"),
        ({"properties": {"a": {"enum": [{"b": [-(2**63)]}]}}}, "over 63 bits"),
        ({"const": -(2**63) + 1}, "over 63 bits"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "not"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_its_reason(schema, words):
    with pytest.raises(UserError, match=r"followed exactly") as refusal:
        json_grammar(schema)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, ["a", None], [1]),
        ({"oneOf": [{"const": 1}, {"enum": ["a"]}]}, [1, "a"], [2]),
        (
            {
                "oneOf": [{"$ref": "#/$defs/name"}, {"type": "array"}],
                "$defs": {"name": {"const": "a"}},
            },
            ["a", []],
            ["b", {}],
        ),
        (
            {"type": "string", "format": "date"},
            ["2024-02-29", "2000-02-29", "0001-01-01", "9999-12-31"],
            ["2023-02-29", "1900-02-29", "0000-01-03", "2023-04-31", "2023-1-1"],
        ),
        (
            {"type": "string", "format": "date-time"},
            ["2024-02-29T10:00:00Z"],
            ["0000-02-29T10:00:00Z", "2023-02-29T10:00:00Z", "2024-02-29"],
        ),
        ({"type": "string", "format": "made-up"}, ["anything"], [1]),
        ({"type": "string", "format": "ipv4"}, ["1.2.3.4"], ["x"]),
    ],
)
def test_schemas_mean_what_the_standard_says(schema, valid, invalid):
    from tests.schemas import judged_valid

    assert all(judged_valid(schema, data) for data in valid)
    assert not any(judged_valid(schema, data) for data in invalid)


@cache
def engine_of(drafter: str, k: int, loop: str, slots: int):
    """mini as commands run it: its programs are those that others have compiled."""
    config = ModelConfig("mini", slots=slots, max_len=ModelConfig.max_len)
    asked = registry.config_type()(drafter=drafter, k=k, loop=loop)
    speculation = registry.resolved(asked, config)
    return make_engine(load_model(config, speculation), speculation)


@cache
def plain() -> list[list[int]]:
    return texts(engine_of("none", 4, "host", 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "k", "loop"),
    [
        (drafter, k, loop)
        for drafter in ("none", "ngram", "suffix", "model", "eagle3")
        for k in (1, 4, 7, 31)
        for loop in ("host", "device")
    ],
)
def test_no_drafter_changes_a_token_of_what_mini_says(drafter, k, loop):
    assert texts(engine_of(drafter, k, loop, 4)) == plain()


def test_documents_are_valid_and_logprobs_are_the_unmasked_ones():
    tokenizer, engine = mini_tokenizer(), engine_of("none", 4, "host", 4)
    seq = requests(0.0, tokens=100)[0]
    engine.run_to_end([seq])
    assert seq.finish == "stop"
    document = json.loads(tokenizer.decode(seq.tokens[seq.prompt_len :]))
    assert document.keys() == SCHEMA["properties"].keys()
    free, held = requests(0.0, 8, constrain=False)[2], requests(0.0, 8)[2]
    for seq in (free, held):
        seq.sampling = Sampling(logprobs=1)
    held.constraint = Recite([*free.tokens, *([7] * 8)])
    first = [event.logprobs[0] for event in engine.run([free]) if event.tokens][0]
    forced = [event.logprobs[0] for event in engine.run([held]) if event.tokens][0]
    assert held.tokens[held.prompt_len :] == [7] * 8
    assert first.top == forced.top and forced.logprob < first.logprob


COMPOSED = composed(AMBIGUOUS, {})


def test_a_limit_at_a_drafted_place_leaves_the_constraint_as_it_was():
    tokenizer = mini_tokenizer()
    (a,) = tokenizer.encode("a")[1:]
    seq = Sequence([2], constraint=TextConstraint(TextRules(grammar=COMPOSED), mini_vocabulary()))
    fresh = Sequence([2], constraint=TextConstraint(TextRules(grammar=COMPOSED), mini_vocabulary()))
    limits = []
    for _ in range(60):
        drafted = mask_rows([seq], np.full((1, 7), a, np.int32), 4096)
        plain = mask_rows([fresh], np.empty((1, 0), np.int32), 4096)
        assert (drafted[0, 0] == plain[0, 0]).all()
        limits.append((seq.constraint.ends_at, fresh.constraint.ends_at))
        if fresh.constraint.ends_at is not None:
            break
        seq.tokens.append(a)
        fresh.tokens.append(a)
    end = limits[-1][1]
    assert limits[-1] == (end, end) and end == len(seq.tokens) - 1
    assert [found for found, _ in limits[-7:]] == [end] * 7 and limits[0] == (None, None)
