"""A chat's prompt holds what tools answered, wherever the results came in, and ends with the text
that the answer is to go on from: with each template that circulates."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from targets.chat_history import paired
from targets.tokenizer import Tokenizer
from tests.support.chats import ATTACKS, controls, histories, results_in, words_of
from tests.support.templates import TEMPLATES, tokenizer_with, with_template

USER = {"role": "user", "content": "Go on"}


@pytest.fixture(params=TEMPLATES)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return tokenizer_with(request.param)


def call(*ids: str | None, **more: Any) -> dict[str, Any]:
    """An assistant's message that calls f once for each id."""
    calls = [
        {"id": i, "type": "function", "function": {"name": "f", "arguments": {"a": str(i)}}}
        for i in ids
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls, **more}


def result(of: str | None, text: str, **more: Any) -> dict[str, Any]:
    more = more if of is None else {"tool_call_id": of, **more}
    return {"role": "tool", "content": text, **more}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def prompt(tokenizer: Tokenizer, *messages: dict[str, Any], **options: Any) -> str:
    return tokenizer.decode(tokenizer.encode_chat(list(messages), **options), skip_special=False)


def shape(*messages: dict[str, Any]) -> list[str]:
    """Of the paired messages: contents, and `calls` where there are calls."""
    return ["calls" if m.get("tool_calls") else m["content"] for m in paired(messages)]


@pytest.mark.parametrize(
    "messages",
    [
        [USER, call("c"), said("running"), result("c", "R1")],
        [USER, call("c"), USER, result("c", "R1")],
        [USER, call("a", "b"), said("running"), result("b", "R2"), USER, result("a", "R1")],
        [USER, call("a"), said("and"), call("b"), result("a", "R1"), result("b", "R2"), USER],
        [USER, result("gone", "R1"), USER],
        [USER, said("hm"), result("gone", "R1")],
        [USER, result("c", "R1"), call("c"), USER],
        [USER, call("c"), result("c", "R1"), call("c"), result("c", "R2")],
        [USER, call("c"), result("c", "R1"), result("c", "R2")],
        [said("hello"), call("c"), {"role": "system", "content": "s"}, result("c", "R1")],
        [{"role": "system", "content": "s"}, {"role": "system", "content": "t"}, call("c"),
         {"role": "developer", "content": "u"}, result(None, "R1")],
    ],
)  # fmt: skip
def test_results_reach_the_prompt(tokenizer, messages):
    assert results_in(messages) <= words_of(prompt(tokenizer, *messages))


@pytest.mark.parametrize(
    ("messages", "order"),
    [
        ([call("c"), said("x"), result("c", "R")], ["calls", "R", "x"]),
        ([call("a", "b"), result("b", "B"), USER, result("a", "A")], ["calls", "A", "B", "Go on"]),
        ([call("a"), call("b"), result("b", "B"), result("a", "A")], ["calls", "A", "calls", "B"]),
        ([call("c"), result("c", "1"), call("c"), result("c", "2")], ["calls", "1", "calls", "2"]),
        ([call("c", "c"), result("c", "1"), result("c", "2")], ["calls", "1", "2"]),
        ([call("c"), USER, call("c"), result("c", "2")], ["calls", "Go on", "calls", "2"]),
        ([call(None), said("x"), result("c", "R")], ["calls", "R", "x"]),
        ([call(None, None), result(None, "1"), result("c", "2")], ["calls", "1", "2"]),
        ([call("a", "b"), result("b", "B"), result(None, "A")], ["calls", "A", "B"]),
        ([call("a"), result(None, "1"), result(None, "2", name="f")], ["calls", "1", "2"]),
        ([call("a", "b"), said("x"), result(None, "R")], ["calls", "R", "x"]),
    ],
)
def test_results_stand_behind_their_calls_in_the_order_of_the_calls(messages, order):
    assert shape(*messages) == order


def test_a_result_without_an_id_is_of_the_function_that_was_called():
    text = prompt(tokenizer_with("mini"), USER, call("c"), said("so"), result(None, "R"))
    assert "response:f{" in text


def test_a_result_without_a_call_is_a_line_of_text_and_logged(tokenizer, caplog):
    caplog.set_level(logging.INFO, "specdec.chat")
    text = prompt(tokenizer, USER, said("Yes."), result("c9", "42 degrees"), USER)
    assert "not in this conversation (c9): 42 degrees" in text
    assert "has no call among the messages" in caplog.text and "42" not in caplog.text


def test_a_template_that_loses_results_in_silence_gets_them_as_text(caplog):
    caplog.set_level(logging.INFO, "specdec.chat")
    silent = with_template(
        "{% for m in messages if m.role != 'tool' %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n"
        "{% endfor %}"
    )
    text = prompt(silent, USER, call("c"), result("c", "42 degrees"))
    assert 'call:f{"a": "c"}' in text and "Result of f: 42 degrees" in text
    assert "leaves out what a tool answered" in caplog.text


def test_plain_histories_are_written_as_ever(tokenizer):
    """Pairing changes nothing where nothing was out of place."""
    chat = [USER, call("a", "b"), result("a", "R1"), result("b", "R2"), said("x"), USER]
    assert paired(chat) == chat
    short = [USER, said("x"), USER]
    assert prompt(tokenizer, *short) == tokenizer.render(short)


BEGINNINGS = [
    ">",
    "|",
    "t",
    "n",
    "turn",
    "|>",
    "turn|>",
    "<turn|",
    "\n",
    " ",
    "  \n",
    "x ",
    "x\n\n",
]
BEGINNINGS += [" x", "model\n", "user", "Go on", "<|turn>", "<turn|>\n<|turn>user\nx", "<|channel>"]
BEGINNINGS += ["<|", "a<|channel>thought\nb<channel|>c", "\ue000", "\ue000\ue001\ue002"]


def check_beginning(tokenizer: Tokenizer, text: str) -> None:
    """The prompt ends with the text as it is, behind the model's header, and no control token
    comes of it."""
    chat = [USER, {"role": "assistant", "content": text}]
    ids = tokenizer.encode_chat(chat, continue_final=True)
    plain = tokenizer.encode_chat([USER, said("x")], continue_final=True)
    assert tokenizer.decode(ids, skip_special=False) == (
        tokenizer.decode(plain, skip_special=False)[:-1] + text
    )
    assert controls(ids) == controls(plain)


@pytest.mark.parametrize("text", BEGINNINGS)
def test_a_begun_answer_ends_the_prompt_as_it_is(tokenizer, text):
    check_beginning(tokenizer, text)


@settings(max_examples=150)
@given(st.sampled_from(TEMPLATES), ATTACKS | st.text(max_size=12))
def test_any_begun_answer_ends_the_prompt_as_it_is(template, text):
    check_beginning(tokenizer_with(template), text)


def test_a_begun_answer_stays_last_and_is_not_moved_behind_results(tokenizer):
    chat = [
        USER,
        call("c"),
        said("so"),
        result("c", "R1"),
        {"role": "assistant", "content": "It >"},
    ]
    text = prompt(tokenizer, *chat, continue_final=True)
    assert text.endswith("It >") and "R1" in text


@settings(max_examples=300)
@given(st.sampled_from(TEMPLATES), histories())
def test_no_history_loses_a_result(template, messages):
    assert results_in(messages) <= words_of(prompt(tokenizer_with(template), *messages))


def test_templates_see_none_where_there_are_no_tools_or_documents():
    text = "{{ tools is none }} {{ documents is none }}{% for m in messages %}{% endfor %}"
    assert with_template(text).render([USER]) == "True True"
    assert with_template(text).render([USER], tools=[{}], documents=[]) == "False False"


def test_generation_tags_are_as_if_they_were_not_there():
    marked = (
        "{% for m in messages %}{{ m.role }}{% generation %}{% set x = m.content %}{{ x }}"
        "{% endgeneration %}.{% endfor %}"
    )
    bare = marked.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    chat = [USER, said("x")]
    assert with_template(marked).render(chat) == with_template(bare).render(chat)
