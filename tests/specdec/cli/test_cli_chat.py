"""`specdec chat`, as typed: answers, what is kept of them, and commands."""

from __future__ import annotations

import io

import pytest

from specdec.cli import main
from specdec.cli.chat import Talk
from specdec.core.config import SamplingConfig
from specdec.core.errors import UserError
from tests.support.commands import refused

ASKED = "Write add."
OPTIONS = ("--drafter", "ngram", "--k", "4", "--max-len", "512", "--max-tokens", "12")


def typed(capsys, monkeypatch, *lines: str) -> tuple[str, str]:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    main(["chat", *OPTIONS, "--temperature", "0"])
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_a_conversation(capsys, monkeypatch):
    """With any drafter, a repeated answer is the same; mistakes cost a line and nothing else."""
    lines = [ASKED, "/drafter none", "/retry", "/drafter", "/drafter ngram", "/k 1", "/retry"]
    lines += ["/k", "/k 9", "/nothing", "/drafter eagle3", "/undo", "/retry", "/help", "/quit"]
    lines += ["never"]
    out, err = typed(capsys, monkeypatch, *lines)
    answers = out.split("\n\n") if "\n\n" in out else [out]
    third = len(out) // 3
    assert out == out[:third] * 3 and answers, out
    assert err.count("12 tokens, ") == 3 and "12 tokens, 0 of them guessed, tau 1.00" in err
    for words in (
        "drafter none, of ngram, none",
        "drafter ngram, of ngram, none",
        "K = 1, of at most 4",
        "/k takes a number from 0 to 4",
        "no command /nothing: /help lists them",
        "no drafter 'eagle3' is loaded: there are ngram, none",
        "there is nothing to answer yet",
        "/retry          answer the last message again",
    ):
        assert words in err, words


def test_bad_options_are_one_line(capsys):
    assert "--max-tokens must be 1 or more" in refused(capsys, "chat", "--max-tokens", "0")


class Refuses:
    """An `LLM` with a short context."""

    def stream(self, messages, params):
        if sum(len(message["content"]) for message in messages) > 100:
            raise UserError("the prompt is too long")
        yield type("Chunk", (), {"text": "Yes."})()


def test_a_message_that_is_refused_is_not_kept():
    talk = Talk(Refuses(), SamplingConfig(), 9, 0)  # pyright: ignore
    with pytest.raises(UserError):
        list(talk.ask("x" * 200))
    assert [chunk.text for chunk in talk.ask("hi")] == ["Yes."]
    assert [message["content"] for message in talk.messages] == ["hi", "Yes."]


class Repeats:
    """An `LLM` that is broken off after half an answer."""

    def stream(self, messages, params):
        self.asked = [dict(message) for message in messages]
        yield type("Chunk", (), {"text": "half"})()
        raise KeyboardInterrupt


def test_what_was_answered_is_kept_where_it_is_broken_off():
    talk = Talk(Repeats(), SamplingConfig(), 9, 0, system="Be brief.")  # pyright: ignore
    with pytest.raises(KeyboardInterrupt):
        list(talk.ask("one"))
    assert talk.messages == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "half"},
    ]
    with pytest.raises(KeyboardInterrupt):
        list(talk.ask("two"))
    assert [m["content"] for m in talk.llm.asked] == ["Be brief.", "one", "half", "two"]  # pyright: ignore
    talk.forget()
    assert len(talk.messages) == 2
