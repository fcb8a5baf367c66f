"""What a request of the Python door may ask for beside sampling: structure, predictions, its own
drafter; and the same from an event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import Future
from html import unescape
from re import fullmatch, sub

import pytest
from pydantic import BaseModel

import specdec
from specdec.core.errors import UserError
from tests.support.until import until

PROMPT = "def add(first, second):"
FORM = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["sum"],
    "additionalProperties": False,
}


class Sum(BaseModel):
    ready: bool


@pytest.fixture(scope="module")
def llm():
    with specdec.load("mini", drafter="ngram", k=4, max_len=256) as llm:
        yield llm


@pytest.fixture(scope="module")
def answer(llm):
    return llm.generate(PROMPT, max_tokens=16, temperature=0)


def test_a_prompt_with_half_a_character_is_one_line(llm):
    with pytest.raises(UserError, match="character 4 of the text is only a part of one"):
        llm.generate("caf\ud83d", max_tokens=4)


@pytest.mark.parametrize("schema", [FORM, json.dumps(FORM)])
def test_json_follows_its_schema(llm, schema):
    found = json.loads(llm.generate(PROMPT, max_tokens=60, json=schema).text)
    assert found.keys() == {"sum"} and 0 <= found["sum"] <= 99


def test_json_of_a_pydantic_model(llm):
    made = llm.generate(PROMPT, max_tokens=60, json=Sum, temperature=0)
    assert isinstance(Sum.model_validate_json(made.text), Sum)


def test_other_structures(llm):
    assert fullmatch("[0-9]{3}(a|b)", llm.generate("x =", regex="[0-9]{3}(a|b)").text)
    assert llm.generate("x =", choice=["yes", "no"]).text in ("yes", "no")
    assert (
        llm.generate("x =", grammar='start: "a" "b"+ "c"', max_tokens=30, temperature=0).text[0]
        == "a"
    )
    assert set(llm.generate("x =", allowed_token_ids=[30, 31], max_tokens=6).token_ids) <= {30, 31}


def test_a_prediction_and_a_drafter_of_its_own_change_no_token(llm, answer):
    """A prediction is guessed from, and the answer names the tokens that it gave."""
    predicted = llm.generate(PROMPT, max_tokens=16, temperature=0, prediction=answer.text)
    plain = llm.generate(PROMPT, max_tokens=16, temperature=0, drafter="none")
    fewer = llm.generate(PROMPT, max_tokens=16, temperature=0, k=1)
    assert predicted.token_ids == plain.token_ids == fewer.token_ids == answer.token_ids
    assert predicted.guessed_by.count("prediction") > 8 and predicted.acceptance.tau > 3
    assert plain.acceptance.drafted == 0 and set(plain.guessed_by) == {None}
    assert fewer.acceptance.drafted <= fewer.acceptance.cycles


def test_an_answer_shows_itself_in_a_notebook(answer):
    assert "".join(answer.token_texts) == answer.text
    page = answer._repr_html_()
    shown = unescape(sub("<[^>]*>", "", page.partition("</pre>")[0]))
    assert shown == answer.text and "tau" in page and "<script" not in page


def test_salts_share_nothing(llm):
    text = list(range(100, 250))
    for salt, cached in (("a", 0), ("b", 0), ("a", 128)):
        assert llm.generate(text, max_tokens=2, cache_salt=salt).cached_tokens == cached


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"json": FORM, "regex": "a"}, "give one of json, regex"),
        ({"json": int}, "int is no pydantic model"),
        ({"json": 5}, "json is a schema"),
        ({"json": "{"}, "not JSON"),
        ({"grammar": "((("}, "neither Lark nor GBNF"),
        ({"regex": "("}, "the grammar can't be used"),
        ({"drafter": "eagle3"}, "'eagle3' is not loaded: there are ngram"),
        ({"k": 9}, "k is 0 to 4"),
        ({"allowed_token_ids": [4096]}, "ids from 0 to 4095"),
        ({"bad_words": [" "]}, "empty word"),
        ({"prediction": [-1]}, "no token id"),
    ],
)
def test_what_makes_no_sense_is_one_line(llm, options, words):
    with pytest.raises(UserError, match=words) as refused:
        llm.generate(PROMPT, max_tokens=2, **options)
    assert "\n" not in str(refused.value)


def test_the_same_names_awaited(llm, answer):
    async def use() -> None:
        awaited = specdec.AsyncLLM(llm)
        both = await awaited.generate_all([PROMPT, PROMPT], max_tokens=16, temperature=0)
        assert [one.token_ids for one in both] == [answer.token_ids] * 2
        chunks = [chunk async for chunk in awaited.stream(PROMPT, max_tokens=16, temperature=0)]
        assert "".join(chunk.text for chunk in chunks) == answer.text
        assert [name for chunk in chunks for name in chunk.guessed_by] == answer.guessed_by
        with pytest.raises(UserError):
            await awaited.generate(PROMPT, k=9)

    asyncio.run(use())


def test_an_interrupted_call_ends_its_request(llm, monkeypatch):
    """Ctrl-C in a notebook: the next cell does not wait behind it."""

    def interrupted(future):
        until(lambda: llm._runner.running == 1)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPT, max_tokens=200, ignore_eos=True)
    until(lambda: llm._runner.running == 0)


def test_a_stream_that_is_left_while_it_is_planned_never_begins(llm, monkeypatch):
    planned, done = llm.planned, threading.Event()

    def slow(*asked):
        wanted.set()
        left.wait()
        try:
            return planned(*asked)
        finally:
            done.set()

    async def leave() -> None:
        stream = specdec.AsyncLLM(llm).stream(PROMPT, max_tokens=3000, ignore_eos=True)
        first = asyncio.ensure_future(anext(stream))
        await asyncio.to_thread(wanted.wait)
        first.cancel()
        left.set()
        await asyncio.gather(first, return_exceptions=True)
        await asyncio.to_thread(done.wait)

    wanted, left = threading.Event(), threading.Event()
    monkeypatch.setattr(llm, "planned", slow)
    asyncio.run(leave())
    assert llm.generate_all([PROMPT], max_tokens=1) and llm._runner.running == 0


def test_a_stream_that_is_left_frees_its_slot(llm):
    async def leave() -> None:
        stream = specdec.AsyncLLM(llm).stream(PROMPT, max_tokens=200, ignore_eos=True)
        async for _ in stream:
            break
        await stream.aclose()

    for _ in range(2 * llm.model.target.slots):
        asyncio.run(leave())
    assert llm.generate(PROMPT, max_tokens=2).finish_reason
