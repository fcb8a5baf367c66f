"""Predicted outputs: the guesses from a given text, and the counts in `usage`. test_constraints.py
tests that they change no token."""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import given, strategies as st

from drafters.ngram.host import NgramDrafter
from drafters.none.host import NoDrafter
from specdec.core.constraint import GuidedDrafter, Unrestricted, forced_prefix_of, guided
from specdec.core.cycle import host_cycle
from specdec.core.engine import DraftSetup, Engine
from specdec.core.prediction import LOOK, PATIENCE, PredictedText, Prediction
from specdec.core.types import NO_GUESS, Sequence
from tests.support.fakes import Noise
from tests.support.fakes_snapshots import cached_engine
from tests.support.serving import TOKENIZER, ServedTarget, served

TEXT = list(range(100, 140))


def followed(answer: list[int], text: list[int] = TEXT, start: int = 0) -> Prediction:
    prediction = Prediction(PredictedText(text), start)
    prediction.read([0] * start + answer)
    return prediction


def test_it_guesses_from_the_beginning_and_ends_with_the_text():
    prediction = followed([])
    assert list(prediction.guess([], 3)) == TEXT[:3]
    assert list(prediction.guess(TEXT[:38], 5)) == TEXT[38:]
    assert list(prediction.guess(TEXT, 5)) == []
    assert (prediction.accepted, prediction.rejected) == (40, 0)


def test_the_host_has_a_say_only_while_it_may_go_on():
    """A loop that runs ahead of the host need not wait for a prediction that was never right, nor
    for one from which the answer parted long ago."""

    def asked(answer):
        seq, said = Sequence([1, 2], max_tokens=50), []
        seq.prediction = followed([], start=2)
        for token in answer:
            said.append(guided([seq]))
            seq.tokens.append(token)
        return said, seq

    assert asked([7, 8, 9, TEXT[5], 7])[0] == [True, False, False, False, False]
    said, seq = asked([*TEXT[:3], *[7] * PATIENCE, *TEXT[9:11], 7])
    assert said == [True] * (3 + PATIENCE) + [False, False, True]
    assert guided([seq])
    seq.tokens += [7] * PATIENCE
    assert not guided([seq])
    seq.constraint = Unrestricted()
    assert guided([seq])


@pytest.mark.parametrize(
    ("answer", "missed"),
    [
        ([*TEXT[:10], 7, *TEXT[11:20]], 1),  # another token
        ([*TEXT[:10], 7, 8, *TEXT[10:20]], 0),  # more
        ([*TEXT[:10], *TEXT[15:20]], 5),  # less
        ([7, 8, 9, *TEXT[:20]], 0),  # another beginning
    ],
)
def test_it_finds_its_place_again_after_an_edit(answer, missed):
    prediction = followed(answer, start=5)
    assert list(prediction.guess([0] * 5 + answer, 4)) == TEXT[20:24]
    assert prediction.accepted == 20 - missed and prediction.rejected == 20 + missed


def test_one_token_that_agrees_is_not_yet_a_place():
    answer = [*TEXT[:10], 7, 8, TEXT[20]]
    assert list(followed(answer).guess(answer, 4)) == []
    answer += [TEXT[21]]
    assert list(followed(answer).guess(answer, 4)) == TEXT[22:26]


def test_of_equal_passages_the_one_that_the_answer_is_in_goes_on():
    text = [1, 2, 3, 50, 1, 2, 3, 60, 1, 2, 3, 70]
    answer = [1, 2, 3, 50, 1, 2, 3]
    assert list(followed(answer, text).guess(answer, 2)) == [60, 1]
    parted = [1, 2, 3, 99, 1, 2, 3]  # the second one is left out, or the first one was changed
    assert list(followed(parted, text).guess(parted, 1)) == [60]


@given(st.lists(st.integers(0, 5)), st.lists(st.integers(0, 5)), st.integers(1, 5))
def test_whatever_comes_it_guesses_from_its_text(text, answer, k):
    prediction, at_once = followed([], text), followed(answer, text)
    for end in range(len(answer) + 1):
        guess = list(prediction.guess(answer[:end], k))
        assert len(guess) <= k
        assert not guess or any(text[i : i + len(guess)] == guess for i in range(len(text)))
    assert prediction.accepted == at_once.accepted <= min(len(text), len(answer))
    assert prediction.accepted + prediction.rejected == len(text)


@given(st.lists(st.tuples(st.integers(0, 39), st.integers(1, 40))), st.integers(0, 2))
def test_what_agrees_is_what_a_comparison_from_the_end_finds(copied, start):
    """It is counted on while the answer follows the text. An id is once in this text, so that the
    place is known; each piece ends with one that is nowhere."""
    answer = [token for at, length in copied for token in [*TEXT[at : at + length], 7]]
    prediction, tokens = followed([], start=start), [0] * start
    for token in answer:
        tokens.append(token)
        agreeing = prediction.agreeing(tokens)
        before = TEXT[: TEXT.index(token) + 1] if token in TEXT else []
        pairs = zip(reversed(tokens[start:]), reversed(before), strict=False)
        equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        assert agreeing == min(LOOK, equal)


def test_an_answer_that_is_not_sought_has_no_place_once_it_has_left():
    prediction, answer = Prediction(PredictedText(TEXT, sought=False), 0), TEXT[:5]
    assert list(prediction.guess(answer, 3)) == TEXT[5:8]
    for token in [7, *TEXT[10:14]]:
        answer = [*answer, token]
        assert list(prediction.guess(answer, 3)) == []


class Forcing:
    failure = None
    ends_at = None

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def forced(self, seq: Sequence) -> list[int]:
        return self.tokens


@pytest.mark.parametrize(("tokens", "row"), [([5, 6], TEXT[:3]), ([5, 6, 9], [7, 8, NO_GUESS])])
def test_what_is_forced_is_guessed_where_nothing_is_predicted(tokens, row):
    seq = Sequence(tokens)
    seq.prediction, seq.constraint = Prediction(PredictedText(TEXT), 2), Forcing([7, 8])
    (found,) = forced_prefix_of([seq], 3).rows
    assert found.tolist() == row


def test_without_a_place_the_drafter_guesses():
    seq = Sequence([5, 6, 7])
    seq.prediction = Prediction(PredictedText(TEXT), 2)
    assert forced_prefix_of([seq], 3) is None
    noise, twin = Noise(50), Noise(50)
    assert (GuidedDrafter(noise).propose([seq], 3).tokens == twin.propose([seq], 3).tokens).all()


@pytest.fixture(scope="module")
def server():
    with served(
        cached_engine(target=ServedTarget(slots=3, chunk=4)), "fake", tokenizer=TOKENIZER
    ) as it:
        yield it


ASK = {"prompt": "abcdefghij", "max_tokens": 12, "seed": 3, "temperature": 1.0}


def test_usage_counts_what_the_answers_repeated(server):
    free = server.post("completions", **ASK).json()
    text = free["choices"][0]["text"]
    assert "accepted_prediction_tokens" not in free["usage"]["completion_tokens_details"]
    for content, accepted, rejected in ((text, 12, 0), (text + "zzz", 12, 3), ("", 0, 0)):
        wish = {"prediction": {"type": "content", "content": content}}
        reply = server.post("completions", **ASK | wish).json()
        assert reply["choices"] == free["choices"]
        details = reply["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == accepted
        assert details["rejected_prediction_tokens"] == rejected
        assert reply["usage"]["completion_tokens"] == free["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    "wish",
    [{"n": 2}, {"logprobs": 2}, {"stop": ["zz"]}, {"echo": True}, {"min_p": 0.1}],
)
def test_nothing_is_refused_beside_it(server, wish):
    prediction = {"type": "content", "content": [{"type": "text", "text": "abcabc"}]}
    free = server.post("completions", **ASK | wish)
    reply = server.post("completions", **ASK | wish | {"prediction": prediction})
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"] == free.json()["choices"]


def test_the_sdk_reads_the_counts_of_a_stream(server):
    stream = server.openai.completions.create(
        model="fake",
        **ASK,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"prediction": {"type": "content", "content": "abc"}},
    )
    details = list(stream)[-1].usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == 3


@pytest.mark.parametrize(("drafter", "k"), [("none", 0), ("ngram", 4)])
def test_the_reply_says_whether_it_was_guessed_from(drafter, k):
    target = ServedTarget(slots=1)
    made = NoDrafter() if drafter == "none" else NgramDrafter()
    drafting = DraftSetup(drafter, (), k)
    engine = Engine(target, made, host_cycle(target, made, k), drafting=drafting)
    with served(engine, "fake", tokenizer=TOKENIZER) as server:
        text = server.post("completions", **ASK).json()["choices"][0]["text"]
        wish = {"prediction": {"type": "content", "content": text}}
        metrics = server.post("completions", **ASK | wish).json()["metrics"]
    assert metrics["speculative"] == {"drafter": drafter, "k": k, "enabled": k > 0}
    assert (metrics["speculative_decoding"]["accepted_tokens"] > 0) == (k > 0)
